// SiLU, and its product with `up` if there is one. An invocation computes four neighbouring values.
struct Options { groups: u32, count: u32, has_up: u32 }

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let i = (index_of(group, counts) * GROUP + own) * 4u;
  if (i >= options.count) { return; }
  let x = load4_x(i);
  var result = x / (1.0 + exp4(-x));
  if (options.has_up != 0u) { result *= load4_up(i); }
  store4_out(i, result, options.count - i);
}
