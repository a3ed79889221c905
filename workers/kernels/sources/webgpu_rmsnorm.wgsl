// RMS norm, a work-group per row.
struct Options { groups: u32, columns: u32, eps: f32, offset: f32, has_weight: u32, rounded: u32 }

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let columns = options.columns;
  let row = index * columns;
  var sum = LongSum();
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    let values = first_of(load4_x(row + c), columns - c, 0.0);
    add_to(&sum, values * values);
  }
  let root = 1.0 / sqrt(tree_sum(sum4(total_of(sum)), own) / f32(columns) + options.eps);
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    var normed = load4_x(row + c) * root;
    if (options.rounded != 0u) {
      normed = vec4(rounded_T(normed.x), rounded_T(normed.y), rounded_T(normed.z), rounded_T(normed.w));
    }
    if (options.has_weight != 0u) { normed *= options.offset + load4_weight(c); }
    store4_out(row + c, normed, columns - c);
  }
}
