// Values of each dtype, read as float and rounded to nearest even when written, one or sixteen at a time. What builds
// this defines T_F32, T_F16 or T_BF16 for the rows, and W_F32, W_F16 or W_BF16 for weights and tables. Sizes and offsets
// are 64 bits wide. No extension is needed: half is a type to load from and store to, and bfloat16 the upper half of a
// float.

#define SIXTEEN 16
#define PART 256  // terms of a sum before it is added to the others: rounding grows with the square root of these

float of_bf16(ushort bits) { return as_float((uint)bits << 16); }
float16 of_bf16_16(ushort16 bits) { return as_float16(convert_uint16(bits) << 16); }

ushort to_bf16(float value) {
  uint bits = as_uint(value);
  return isnan(value) ? (ushort)((bits >> 16) | 0x40) : (ushort)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ushort16 to_bf16_16(float16 value) {
  uint16 bits = as_uint16(value);
  uint16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return convert_ushort16(select(rounded, (bits >> 16) | 0x40u, isnan(value)));
}

// Sixteen halves are loaded as integers and converted in a variable, which is aligned. vload_half16 of PoCL 3.1 assumes
// an aligned address, which OpenCL does not require, and crashes the process on a CPU without AVX-512.
float16 of_half_16(ushort16 bits) { return vload_half16(0, (const half *)&bits); }

ushort16 to_half_16(float16 value) {
  ushort16 bits;
  vstore_half16_rte(value, 0, (half *)&bits);
  return bits;
}

#if defined(T_F32)
typedef float T;
#define LOAD(p, i) (p)[i]
#define LOAD16(p, i) vload16(0, (p) + (i))
#define STORE(value, p, i) (p)[i] = (value)
#define STORE16(value, p, i) vstore16(value, 0, (p) + (i))
#define ROUNDED(value) (value)
#define ROUNDED16(value) (value)
#elif defined(T_F16)
typedef half T;
#define LOAD(p, i) vload_half(i, p)
#define LOAD16(p, i) of_half_16(vload16(0, (const global ushort *)(p) + (i)))
#define STORE(value, p, i) vstore_half_rte(value, i, p)
#define STORE16(value, p, i) vstore16(to_half_16(value), 0, (global ushort *)(p) + (i))
float ROUNDED(float value) {
  ushort kept[1];  // a variable of half would need an extension
  vstore_half_rte(value, 0, (half *)kept);
  return vload_half(0, (half *)kept);
}
float16 ROUNDED16(float16 value) { return of_half_16(to_half_16(value)); }
#elif defined(T_BF16)
typedef ushort T;
#define LOAD(p, i) of_bf16((p)[i])
#define LOAD16(p, i) of_bf16_16(vload16(0, (p) + (i)))
#define STORE(value, p, i) (p)[i] = to_bf16(value)
#define STORE16(value, p, i) vstore16(to_bf16_16(value), 0, (p) + (i))
#define ROUNDED(value) of_bf16(to_bf16(value))
#define ROUNDED16(value) of_bf16_16(to_bf16_16(value))
#endif

#if defined(W_F32)
typedef float W;
#define LOAD_W(p, i) (p)[i]
#define LOAD_W16(p, i) vload16(0, (p) + (i))
#elif defined(W_F16)
typedef half W;
#define LOAD_W(p, i) vload_half(i, p)
#define LOAD_W16(p, i) of_half_16(vload16(0, (const global ushort *)(p) + (i)))
#elif defined(W_BF16)
typedef ushort W;
#define LOAD_W(p, i) of_bf16((p)[i])
#define LOAD_W16(p, i) of_bf16_16(vload16(0, (p) + (i)))
#endif

float sum16(float16 v) {
  float8 eight = v.lo + v.hi;
  float4 four = eight.lo + eight.hi;
  return (four.x + four.z) + (four.y + four.w);
}

float max16(float16 v) {
  float8 eight = fmax(v.lo, v.hi);
  float4 four = fmax(eight.lo, eight.hi);
  return fmax(fmax(four.x, four.z), fmax(four.y, four.w));
}

// A lane for each of the `count` values from p[0], at most sixteen; `rest` in the others.
float16 load_tail(const global T *p, long count, float rest) {
  float lanes[16];
  for (int i = 0; i < 16; i++) lanes[i] = i < count ? LOAD(p, i) : rest;
  return vload16(0, lanes);
}

// Sum of a[i] * b[i]: sixteen sums, each of parts.
float dot_of(const global T *a, const global T *b, long count) {
  float16 total = 0.0f;
  long i = 0;
  while (i + 16 <= count) {
    long end = min(count - 15, i + 16 * PART);
    float16 part = 0.0f;
    for (; i < end; i += 16) part += LOAD16(a, i) * LOAD16(b, i);
    total += part;
  }
  if (i < count) total += load_tail(a + i, count - i, 0.0f) * load_tail(b + i, count - i, 0.0f);
  return sum16(total);
}
