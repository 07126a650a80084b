// The least time an allreduce among ranks of one host can take: its memory traffic and nothing else.
//
// Every rank is a thread with a buffer of its own. Each reduces its share, 1/ranks of the elements, from all buffers
// and writes the result to all of them: the least traffic that leaves every rank its own copy of the sum.
//
//   limit RANKS
//
// Then reads lines "BYTES CALLS" and answers each with a line: the microseconds of each call. It sleeps in between.
// Every block of calls begins with one whose sums are checked.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kPiece = 4096;  // elements: sums are written while they are in the cache

class Limit {
 public:
  explicit Limit(int ranks) : ranks_(ranks), buffers_(ranks) { pthread_barrier_init(&barrier_, nullptr, ranks); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;
  ~Limit() {
    Free();
    pthread_barrier_destroy(&barrier_);
  }

  // Makes the buffers that the next blocks use.
  void Resize(size_t count) {
    if (count == count_) return;
    Free();
    count_ = count;
    for (float*& buffer : buffers_) {
      buffer = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
      if (buffer == nullptr) throw std::bad_alloc();
    }
  }

  // Microseconds of each call on the first rank.
  std::vector<double> Run(int calls) {
    std::vector<double> times(calls);
    wrong_ = false;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) threads.emplace_back([&, rank] { RunRank(rank, &times); });
    for (std::thread& thread : threads) thread.join();
    return times;
  }

  [[nodiscard]] bool Wrong() const { return wrong_; }

 private:
  static float Value(int rank, size_t index) { return static_cast<float>(index % 997 + 1000 * rank); }

  void RunRank(int rank, std::vector<double>* times) {
    for (size_t i = 0; i < count_; ++i) buffers_[rank][i] = Value(rank, i);
    Call(rank);
    for (size_t i = 0; i < count_; ++i) {
      float expected = 0;
      for (int r = 0; r < ranks_; ++r) expected += Value(r, i);
      if (buffers_[rank][i] != expected) wrong_ = true;
    }
    std::fill_n(buffers_[rank], count_, 0.f);
    for (double& time : *times) {
      double seconds = Call(rank);
      if (rank == 0) time = seconds * 1e6;
    }
  }

  double Call(int rank) {
    pthread_barrier_wait(&barrier_);
    auto start = std::chrono::steady_clock::now();
    size_t end = count_ * (rank + 1) / ranks_;
    float* mine = buffers_[rank];
    for (size_t piece = count_ * rank / ranks_; piece < end; piece += kPiece) {
      size_t last = std::min(end, piece + kPiece);
      for (int r = 0; r < ranks_; ++r) {
        if (r == rank) continue;
        const float* other = buffers_[r];
        for (size_t i = piece; i < last; ++i) mine[i] += other[i];
      }
      for (int r = 0; r < ranks_; ++r) {
        if (r != rank) std::copy(mine + piece, mine + last, buffers_[r] + piece);
      }
    }
    pthread_barrier_wait(&barrier_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void Free() {
    for (float*& buffer : buffers_) {
      std::free(buffer);
      buffer = nullptr;
    }
  }

  const int ranks_;
  size_t count_ = 0;
  std::vector<float*> buffers_;
  std::atomic<bool> wrong_ = false;
  pthread_barrier_t barrier_;
};

}  // namespace

int main(int argc, char** argv) {
  int ranks = argc == 2 ? std::atoi(argv[1]) : 0;
  if (ranks < 1) {
    std::fprintf(stderr, "limit RANKS\n");
    return 2;
  }
  Limit limit(ranks);
  size_t bytes = 0;
  int calls = 0;
  while (std::scanf("%zu %d", &bytes, &calls) == 2) {
    limit.Resize(std::max<size_t>(1, bytes / sizeof(float)));
    std::string line;
    for (double time : limit.Run(calls)) line += std::to_string(time) + ' ';
    if (limit.Wrong()) {
      std::fprintf(stderr, "wrong sums\n");
      return 1;
    }
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  return 0;
}
