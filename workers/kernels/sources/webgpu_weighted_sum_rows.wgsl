// Weighted sum of rows: a work-group computes 32 columns, an invocation four of them in every (GROUP / 8)-th row; a
// tree adds these.
struct Options { groups: u32, length: u32, width: u32 }

const ACROSS = 8u;
var<workgroup> sums_of: array<vec4<f32>, GROUP>;

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let blocks = (options.width + ACROSS * 4u - 1u) / (ACROSS * 4u);
  let batch = index / blocks;
  let column = (index % blocks * ACROSS + own % ACROSS) * 4u;
  var sum = LongSum();
  if (column < options.width) {
    for (var t = own / ACROSS; t < options.length; t += GROUP / ACROSS) {
      let row = batch * options.length + t;
      add_to(&sum, load_weights(row) * load4_rows(row * options.width + column));
    }
  }
  sums_of[own] = total_of(sum);
  for (var half_of = GROUP / 2u; half_of >= ACROSS; half_of /= 2u) {
    workgroupBarrier();
    if (own < half_of) { sums_of[own] += sums_of[own + half_of]; }
  }
  if (own < ACROSS && column < options.width) {
    store4_out(batch * options.width + column, sums_of[own], options.width - column);
  }
}
