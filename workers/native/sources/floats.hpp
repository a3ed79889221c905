// Convert between float64, float32, bfloat16 and float16, and count the changes, a few KiB at a time.
// Rounding is to nearest, ties to even, through float32, as in torch. NaN keeps its sign and the first bits of its
// payload and becomes quiet; only bfloat16 to float32, which appends zero bits, does not change it.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace floats {

struct Change {
  uint64_t values, new_inf, new_nan;
  double most, most_relative;  // errors of values finite before and after; the relative one of those other than 0
};

template <class To, class From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float wide(BF16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

inline float wide(F16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = (x.bits & 0x7FFFu) << 13;
  const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(rest) * 0x1p112f);
  const uint32_t special = rest | 0x7F800000u | (rest > 0x0F800000u ? 0x00400000u : 0u);
  return bits_as<float>(sign | (rest >= 0x0F800000u ? special : scaled));
}

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }

template <class To>
inline To narrow(float x);

template <>
inline float narrow<float>(float x) {
  return x;
}

template <>
inline BF16 narrow<BF16>(float x) {
  const uint32_t u = bits_as<uint32_t>(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16, nan = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded)};
}

template <>
inline F16 narrow<F16>(float x) {
  const uint32_t u = bits_as<uint32_t>(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7FFFFFFFu;
  const uint32_t normal = (rest + 0xC8000FFFu + ((rest >> 13) & 1u)) >> 13;
  const uint32_t tiny = bits_as<uint32_t>(bits_as<float>(rest) + 0.5f) - 0x3F000000u;
  const uint32_t large = rest > 0x7F800000u ? (0x7E00u | ((rest >> 13) & 0x3FFu)) : 0x7C00u;
  const uint32_t finite = rest < 0x38800000u ? tiny : normal;
  return {static_cast<uint16_t>(sign | (rest >= 0x47800000u ? large : finite))};
}

template <class To, class From>
inline To converted(From x) {
  if constexpr (std::is_same<To, double>::value) return static_cast<double>(wide(x));
  else return narrow<To>(static_cast<float>(wide(x)));
}

// Differences are counted in this type: float32, or float64 if one side is float64.
template <class From, class To>
using Common = typename std::conditional<std::is_same<From, double>::value || std::is_same<To, double>::value, double,
                                         float>::type;

template <class W>
struct Layout;
template <>
struct Layout<float> {
  using Bits = int32_t;
  static constexpr Bits EXPONENT = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;
};
template <>
struct Layout<double> {
  using Bits = int64_t;
  static constexpr Bits EXPONENT = 0x7FF0000000000000, MAGNITUDE = 0x7FFFFFFFFFFFFFFF;
};

template <class From, class To>
void count_special(const From* from, const To* to, size_t n, Change& change) {
  using W = Common<From, To>;
  for (size_t i = 0; i < n; i++) {
    const W b = wide(from[i]), a = wide(to[i]);
    const bool nan_before = b != b, nan_after = a != a;
    change.values += a != b && !(nan_before && nan_after);
    change.new_inf += std::isinf(a) && !std::isinf(b);
    change.new_nan += nan_after && !nan_before;
    if (!std::isfinite(a) || !std::isfinite(b)) continue;
    const W error = std::fabs(b - a);
    if (error > change.most) change.most = error;
    if (b != 0 && error / std::fabs(b) > change.most_relative) change.most_relative = error / std::fabs(b);
  }
}

// Magnitudes are compared as integers, which have the same order and which compilers vectorize. The division is done
// only if the relative error may exceed the maximum so far: if error >= most * |before|, rounded.
template <class From, class To>
void count(const From* from, const To* to, size_t n, Change& change) {
  using W = Common<From, To>;
  using L = Layout<W>;
  using Bits = typename L::Bits;
  const W most_relative = static_cast<W>(change.most_relative);
  Bits most = 0, changed = 0, special = 0, exceeds = 0;
  for (size_t i = 0; i < n; i++) {
    const W b = wide(from[i]), a = wide(to[i]);
    const W error = bits_as<W>(static_cast<Bits>(bits_as<Bits>(static_cast<W>(b - a)) & L::MAGNITUDE));
    const W before = bits_as<W>(static_cast<Bits>(bits_as<Bits>(b) & L::MAGNITUDE));
    const Bits size = bits_as<Bits>(error);
    special |= (bits_as<Bits>(b) & L::EXPONENT) == L::EXPONENT;
    special |= (bits_as<Bits>(a) & L::EXPONENT) == L::EXPONENT;
    changed += size != 0;
    most = size > most ? size : most;
    exceeds |= (size != 0) & (error >= most_relative * before);
  }
  if (special) return count_special(from, to, n, change);
  if (!changed) return;
  change.values += static_cast<uint64_t>(changed);
  const double error = bits_as<W>(most);
  if (error > change.most) change.most = error;
  if (!exceeds) return;
  Bits relative = 0;
  for (size_t i = 0; i < n; i++) {
    const W b = wide(from[i]), a = wide(to[i]);
    const W ratio = b == 0 ? W(0) : (b - a) / b;
    const Bits size = bits_as<Bits>(ratio) & L::MAGNITUDE;
    relative = size > relative ? size : relative;
  }
  const double ratio = bits_as<W>(relative);
  if (ratio > change.most_relative) change.most_relative = ratio;
}

template <class From, class To>
void convert(const uint8_t* from, uint8_t* to, size_t n, Change* change) {
  const From* source = reinterpret_cast<const From*>(from);
  To* target = reinterpret_cast<To*>(to);
  for (size_t i = 0; i < n; i++) target[i] = converted<To>(source[i]);
  if (change) count(source, target, n, *change);
}

using Convert = void (*)(const uint8_t* from, uint8_t* to, size_t n, Change* change);

template <class From>
Convert chosen(int to) {
  switch (to) {
    case 0: return convert<From, double>;
    case 1: return convert<From, float>;
    case 2: return convert<From, BF16>;
    case 3: return convert<From, F16>;
  }
  return nullptr;
}

// Dtypes: 0 float64, 1 float32, 2 bfloat16, 3 float16; nullptr for any other number.
inline Convert chosen(int from, int to) {
  switch (from) {
    case 0: return chosen<double>(to);
    case 1: return chosen<float>(to);
    case 2: return chosen<BF16>(to);
    case 3: return chosen<F16>(to);
  }
  return nullptr;
}

inline size_t bytes_of(int code) { return code == 0 ? 8 : code == 1 ? 4 : 2; }

}  // namespace floats
