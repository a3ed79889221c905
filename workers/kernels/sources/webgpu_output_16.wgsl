// An array in dtype T of 16 bits that is written: NAME. `i` counts values. Two share a word, and may belong to two
// groups, as the end of an odd row and the beginning of the next: each then replaces its own half.
@group(0) @binding(BINDING) var<storage, read_write> NAME: array<atomic<u32>>;

fn store_NAME(i: u32, value: f32) {
  let shift = (i % 2u) * 16u;
  atomicAnd(&NAME[i / 2u], 0xffff0000u >> shift);
  atomicOr(&NAME[i / 2u], bits_T(value) << shift);
}

fn store2_NAME(i: u32, values: vec2<f32>, count: u32) {
  if (count > 1u && i % 2u == 0u) {
    atomicStore(&NAME[i / 2u], bits_T(values.x) | (bits_T(values.y) << 16u));
    return;
  }
  if (count > 0u) { store_NAME(i, values.x); }
  if (count > 1u) { store_NAME(i + 1u, values.y); }
}

// The first `count` of four neighbours.
fn store4_NAME(i: u32, values: vec4<f32>, count: u32) {
  store2_NAME(i, values.xy, count);
  store2_NAME(i + 2u, values.zw, max(count, 2u) - 2u);
}
