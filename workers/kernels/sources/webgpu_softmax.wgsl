// Softmax, a work-group per row.
struct Options { groups: u32, columns: u32 }

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let columns = options.columns;
  let row = index * columns;
  var most = minus_infinity();
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    most = max(most, max4(first_of(load4_x(row + c), columns - c, minus_infinity())));
  }
  most = tree_max(most, own);
  var sum = LongSum();
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    add_to(&sum, first_of(exp4(load4_x(row + c) - most), columns - c, 0.0));
  }
  let share = 1.0 / tree_sum(sum4(total_of(sum)), own);
  for (var c = own * 4u; c < columns; c += GROUP * 4u) {
    store4_out(row + c, exp4(load4_x(row + c) - most) * share, columns - c);
  }
}
