// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for handshakes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace ronde {

std::string Sha256(std::string_view data);                            // 32 bytes
std::string HmacSha256(std::string_view key, std::string_view data);  // 32 bytes
// Takes the same time wherever they differ.
bool EqualSecrets(std::string_view a, std::string_view b);
// From the kernel.
std::string RandomBytes(std::size_t count);
std::string Hex(std::string_view bytes);

}  // namespace ronde
