// Layer norm, a work-group per row. The variance is that of differences from the mean, which a second pass adds.
struct Options { groups: u32, columns: u32, eps: f32, has_weight: u32, has_bias: u32 }

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let columns = options.columns;
  let row = index * columns;
  var sum = LongSum();
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    add_to(&sum, first_of(load4_x(row + c), columns - c, 0.0));
  }
  let mean = tree_sum(sum4(total_of(sum)), own) / f32(columns);
  var squares = LongSum();
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    let centred = first_of(load4_x(row + c) - mean, columns - c, 0.0);
    add_to(&squares, centred * centred);
  }
  let root = 1.0 / sqrt(tree_sum(sum4(total_of(squares)), own) / f32(columns) + options.eps);
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    var normed = (load4_x(row + c) - mean) * root;
    if (options.has_weight != 0u) { normed *= load4_weight(c); }
    if (options.has_bias != 0u) { normed += load4_bias(c); }
    store4_out(row + c, normed, columns - c);
  }
}
