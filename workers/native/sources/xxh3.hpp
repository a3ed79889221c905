// Streaming XXH3, 128 bits, seed 0, in its form for more than 240 bytes; only the shortest chunks have fewer.
// Written from the specification in xxHash's doc/xxhash_spec.md; tests compare it with the reference implementation.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace xxh3 {

constexpr size_t STRIPE = 64, STRIPES_PER_BLOCK = 16, SECRET_BYTES = 192;
constexpr size_t AHEAD = 1024;  // bytes to prefetch
constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
constexpr uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

alignas(64) constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

inline uint64_t word(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

#if defined(__AVX2__)
inline void accumulate(uint64_t* acc, const uint8_t* data, const uint8_t* secret, size_t stripes) {
  __m256i low = _mm256_load_si256(reinterpret_cast<__m256i*>(acc));
  __m256i high = _mm256_load_si256(reinterpret_cast<__m256i*>(acc) + 1);
  const auto round = [](__m256i sum, const uint8_t* p, const uint8_t* s) {
    const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s)));
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sum, _mm256_shuffle_epi32(value, 0x4E)), product);
  };
  for (size_t i = 0; i < stripes; i++) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(data) + i * STRIPE + AHEAD));
    low = round(low, data + i * STRIPE, secret + i * 8);
    high = round(high, data + i * STRIPE + 32, secret + i * 8 + 32);
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(acc), low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(acc) + 1, high);
}
#else
inline void accumulate(uint64_t* acc, const uint8_t* data, const uint8_t* secret, size_t stripes) {
  for (size_t i = 0; i < stripes; i++) {
    uint64_t value[8], key[8];
    for (int lane = 0; lane < 8; lane++) value[lane] = word(data + i * STRIPE + lane * 8);
    for (int lane = 0; lane < 8; lane++) key[lane] = value[lane] ^ word(secret + i * 8 + lane * 8);
    for (int lane = 0; lane < 8; lane++) acc[lane] += value[lane ^ 1] + (key[lane] & 0xFFFFFFFFu) * (key[lane] >> 32);
  }
}
#endif

inline void scramble(uint64_t* acc) {
  const uint8_t* secret = SECRET + SECRET_BYTES - STRIPE;
  for (int lane = 0; lane < 8; lane++) {
    acc[lane] = (acc[lane] ^ (acc[lane] >> 47) ^ word(secret + lane * 8)) * P32_1;
  }
}

inline uint64_t merged(const uint64_t* acc, const uint8_t* secret, uint64_t start) {
  for (int i = 0; i < 4; i++) {
    const unsigned __int128 product = static_cast<unsigned __int128>(acc[2 * i] ^ word(secret + 16 * i)) *
                                      (acc[2 * i + 1] ^ word(secret + 16 * i + 8));
    start += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  start = (start ^ (start >> 37)) * 0x165667919E3779F9u;
  return start ^ (start >> 32);
}

// A stripe is added to the sums only when a later byte is known: `digest` handles the last 64 bytes separately.
struct State {
  alignas(64) uint64_t acc[8];
  uint8_t waiting[STRIPE], before[STRIPE];  // bytes not yet in the sums; the last stripe in them
  uint64_t total, held, in_block;

  void begin() {
    const uint64_t first[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    std::memcpy(acc, first, sizeof acc);
    total = held = in_block = 0;
  }

  void take(const uint8_t* data, size_t stripes) {
    std::memcpy(before, data + (stripes - 1) * STRIPE, STRIPE);
    while (stripes) {
      const size_t left = STRIPES_PER_BLOCK - in_block, now = stripes < left ? stripes : left;
      accumulate(acc, data, SECRET + in_block * 8, now);
      data += now * STRIPE, stripes -= now, in_block += now;
      if (in_block == STRIPES_PER_BLOCK) scramble(acc), in_block = 0;
    }
  }

  void update(const uint8_t* data, size_t size) {
    total += size;
    if (held + size <= STRIPE) {
      std::memcpy(waiting + held, data, size), held += size;
      return;
    }
    const size_t missing = STRIPE - held;
    std::memcpy(waiting + held, data, missing);
    take(waiting, 1);
    data += missing, size -= missing;
    if (size > STRIPE) {
      const size_t stripes = (size - 1) / STRIPE;
      take(data, stripes);
      data += stripes * STRIPE, size -= stripes * STRIPE;
    }
    std::memcpy(waiting, data, size), held = size;
  }

  // Writes the canonical form: 16 bytes, most significant first. Only for more than 240 bytes.
  void digest(uint8_t* out) const {
    alignas(64) uint64_t sums[8];
    uint8_t last[STRIPE];
    std::memcpy(sums, acc, sizeof sums);
    std::memcpy(last, before + held, STRIPE - held);
    std::memcpy(last + STRIPE - held, waiting, held);
    accumulate(sums, last, SECRET + SECRET_BYTES - STRIPE - 7, 1);
    const uint64_t low = merged(sums, SECRET + 11, total * P64_1);
    const uint64_t high = merged(sums, SECRET + SECRET_BYTES - STRIPE - 11, ~(total * P64_2));
    for (int i = 0; i < 8; i++) out[i] = high >> (56 - 8 * i), out[8 + i] = low >> (56 - 8 * i);
  }
};

}  // namespace xxh3
