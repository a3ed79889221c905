// An array that is read: NAME, in dtype T. `i` counts values; four are read from any `i`, also across words.
@group(0) @binding(BINDING) var<storage, read> NAME: array<QUAD_T>;

fn load_NAME(i: u32) -> f32 { return values_T(NAME[i / 4u])[i % 4u]; }

fn load4_NAME(i: u32) -> vec4<f32> {
  let first = values_T(NAME[i / 4u]);
  let lane = i % 4u;
  if (lane == 0u) { return first; }
  let second = values_T(NAME[i / 4u + 1u]);
  if (lane == 1u) { return vec4(first.yzw, second.x); }
  if (lane == 2u) { return vec4(first.zw, second.xy); }
  return vec4(first.w, second.xyz);
}
