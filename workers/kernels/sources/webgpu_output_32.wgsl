// An array of float32 that is written: NAME. `i` counts values.
@group(0) @binding(BINDING) var<storage, read_write> NAME: array<f32>;

fn store_NAME(i: u32, value: f32) { NAME[i] = value; }

// The first `count` of four neighbours.
fn store4_NAME(i: u32, values: vec4<f32>, count: u32) {
  if (count > 0u) { NAME[i] = values.x; }
  if (count > 1u) { NAME[i + 1u] = values.y; }
  if (count > 2u) { NAME[i + 2u] = values.z; }
  if (count > 3u) { NAME[i + 3u] = values.w; }
}
