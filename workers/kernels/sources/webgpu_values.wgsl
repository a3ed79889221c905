// Values of each dtype as float, four at a time, and their bits rounded to nearest even. Buffers hold words of 32 bits,
// so no extension is needed: values of 16 bits are two to a word, those of bool four. Conversions of 16 bits work on
// integers, because a driver may round WGSL's pack2x16float as it likes, and may flush subnormal numbers.

alias QUAD_F32 = vec4<u32>;
alias QUAD_F16 = vec2<u32>;
alias QUAD_BF16 = vec2<u32>;
alias QUAD_BOOL = u32;

// WGSL has no literal for infinity, and refuses an expression of constants that is infinite.
fn minus_infinity() -> f32 {
  var bits = 0xff800000u;
  return bitcast<f32>(bits);
}

// Comparisons with NaN or infinity may be optimised away as impossible: only bits are reliable.
fn is_nan(value: f32) -> bool { return (bitcast<u32>(value) & 0x7fffffffu) > 0x7f800000u; }
fn is_minus_infinity(value: f32) -> bool { return bitcast<u32>(value) == 0xff800000u; }

fn halves_of(words: vec2<u32>) -> vec4<u32> {
  return vec4(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
}

fn values_F32(words: vec4<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(words); }

fn values_BF16(words: vec2<u32>) -> vec4<f32> { return bitcast<vec4<f32>>(halves_of(words) << vec4(16u)); }

fn values_F16(words: vec2<u32>) -> vec4<f32> {
  let halves = halves_of(words);
  let magnitude = halves & vec4(0x7fffu);
  let normal = (magnitude << vec4(13u)) + vec4(0x38000000u);
  let special = (magnitude << vec4(13u)) | vec4(0x7f800000u);
  let subnormal = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 5.9604644775390625e-8);
  let bits = select(select(normal, subnormal, magnitude < vec4(0x400u)), special, magnitude >= vec4(0x7c00u));
  return bitcast<vec4<f32>>(bits | ((halves & vec4(0x8000u)) << vec4(16u)));
}

fn values_BOOL(word: u32) -> vec4<f32> {
  return select(vec4(0.0), vec4(1.0), ((vec4(word) >> vec4(0u, 8u, 16u, 24u)) & vec4(0xffu)) != vec4(0u));
}

fn bits_F32(value: f32) -> u32 { return bitcast<u32>(value); }
fn rounded_F32(value: f32) -> f32 { return value; }

fn bits_BF16(value: f32) -> u32 {
  let bits = bitcast<u32>(value);
  return select((bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u, (bits >> 16u) | 0x40u, is_nan(value));
}
fn rounded_BF16(value: f32) -> f32 { return bitcast<f32>(bits_BF16(value) << 16u); }

fn bits_F16(value: f32) -> u32 {
  let sign = (bitcast<u32>(value) >> 16u) & 0x8000u;
  let magnitude = bitcast<u32>(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) { return sign | 0x7e00u; }
  if (magnitude >= 0x477ff000u) { return sign | 0x7c00u; }  // 65520 and more become infinite
  if (magnitude < 0x38800000u) { return sign | u32(round(bitcast<f32>(magnitude) * 16777216.0)); }
  return sign | ((magnitude + 0xfffu + ((magnitude >> 13u) & 1u) - 0x38000000u) >> 13u);
}
fn rounded_F16(value: f32) -> f32 { return values_F16(vec2(bits_F16(value), 0u)).x; }

// e to the power of `x` with an error below two units in the last place; WGSL allows 3 + 2 |x|.
fn exp_of(x: f32) -> f32 {
  let within = clamp(x, -104.0, 89.0);
  let power = round(within * 1.44269504);
  let rest = (within - power * 0.693359375) + power * 2.12194440e-4;
  var sum = 1.9875691500e-4;
  sum = sum * rest + 1.3981999507e-3;
  sum = sum * rest + 8.3334519073e-3;
  sum = sum * rest + 4.1665795894e-2;
  sum = sum * rest + 1.6666665459e-1;
  sum = sum * rest + 0.5;
  sum = sum * rest * rest + rest + 1.0;
  let half_power = i32(power) / 2;  // two factors, since 2 to the whole power may not be a normal number
  let first = bitcast<f32>(u32(half_power + 127) << 23u);
  let second = bitcast<f32>(u32(i32(power) - half_power + 127) << 23u);
  return select(sum * first * second, x, is_nan(x));
}

fn exp4(x: vec4<f32>) -> vec4<f32> { return vec4(exp_of(x.x), exp_of(x.y), exp_of(x.z), exp_of(x.w)); }

// The first `count` of four lanes, and `rest` in the others.
fn first_of(values: vec4<f32>, count: u32, rest: f32) -> vec4<f32> {
  return select(vec4(rest), values, vec4(0u, 1u, 2u, 3u) < vec4(count));
}

fn sum4(values: vec4<f32>) -> f32 { return (values.x + values.z) + (values.y + values.w); }
fn max4(values: vec4<f32>) -> f32 { return max(max(values.x, values.z), max(values.y, values.w)); }

// A long sum: terms are added to a part, and parts to the total, because rounding grows with the terms of a chain.
const PART = 128u;
struct LongSum { total: vec4<f32>, part: vec4<f32>, terms: u32 }

fn add_to(sum: ptr<function, LongSum>, term: vec4<f32>) {
  (*sum).part += term;
  (*sum).terms += 1u;
  if ((*sum).terms % PART == 0u) {
    (*sum).total += (*sum).part;
    (*sum).part = vec4(0.0);
  }
}

fn total_of(sum: LongSum) -> vec4<f32> { return sum.total + sum.part; }

// Groups are dispatched in two dimensions, because one has at most 65,535.
fn index_of(group: vec3<u32>, counts: vec3<u32>) -> u32 { return group.x + group.y * counts.x; }
