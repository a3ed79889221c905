// Rotary embedding. An invocation computes four neighbouring values, each from both values of its pair.
struct Options {
  groups: u32, count: u32, first_token: u32, length: u32, width: u32, pairs: u32, position: u32, adjacent: u32,
}

fn rotated(i: u32) -> f32 {
  let token = i / options.width;
  let value = i % options.width;
  let pairs = options.pairs;
  if (value >= 2u * pairs) { return load_x(i); }
  let is_adjacent = options.adjacent != 0u;
  let pair = select(value % pairs, value / 2u, is_adjacent);
  let is_second = select(value >= pairs, value % 2u == 1u, is_adjacent);
  let distance = select(pairs, 1u, is_adjacent);
  let row = (options.first_token + token) % options.length + options.position;
  let cosine = load_cos(row * pairs + pair);
  let sine = load_sin(row * pairs + pair);
  if (is_second) { return load_x(i) * cosine + load_x(i - distance) * sine; }
  return load_x(i) * cosine - load_x(i + distance) * sine;
}

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let i = (index_of(group, counts) * GROUP + own) * 4u;
  if (i >= options.count) { return; }
  let count = options.count - i;
  var result = vec4(rotated(i), 0.0, 0.0, 0.0);
  if (count > 1u) { result.y = rotated(i + 1u); }
  if (count > 2u) { result.z = rotated(i + 2u); }
  if (count > 3u) { result.w = rotated(i + 3u); }
  store4_out(i, result, count);
}
