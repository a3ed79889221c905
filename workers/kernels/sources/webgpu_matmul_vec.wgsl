// Product of a matrix and a vector, a work-group per row.
struct Options { groups: u32, rows: u32, depth: u32 }

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let depth = options.depth;
  let row = index * depth;
  let vector = index / options.rows * depth;
  var sum = LongSum();
  for (var k = own * 4u; k < depth; k += GROUP * 4u) {
    add_to(&sum, first_of(load4_a(row + k), depth - k, 0.0) * first_of(load4_x(vector + k), depth - k, 0.0));
  }
  let total = tree_sum(sum4(total_of(sum)), own);
  if (own == 0u) { store_out(index, total); }
}
