"""Shapes of ResNet-50's 161 gradients, 25 557 032 floats (He et al., arXiv:1512.03385, table 1; strides play no part)."""

Shape = tuple[int, ...]


def forward_shapes() -> list[Shape]:
    """Parameters in the order of the forward pass: a convolution's weights, then its normalization's two vectors."""
    shapes: list[Shape] = []

    def convolution(out: int, into: int, kernel: int) -> None:
        shapes.extend([(out, into, kernel, kernel), (out,), (out,)])

    convolution(64, 3, 7)
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, channels, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, channels, 1)  # the shortcut's projection
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def backward_shapes() -> list[Shape]:
    """Gradients in the order in which the backward pass makes them."""
    return forward_shapes()[::-1]


def floats(shape: Shape) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def buckets(shapes: list[Shape], first: int = 1 << 20, later: int = 25 << 20) -> list[int]:
    """Floats in the buckets into which torch's DistributedDataParallel gathers float32 gradients, at its defaults."""
    sizes, held, limit = [], 0, first
    for shape in shapes:
        held += floats(shape)
        if held * 4 >= limit:
            sizes.append(held)
            held, limit = 0, later
    return [*sizes, held] if held else sizes
