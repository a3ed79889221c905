// Sums and the greatest of a work-group's values, by a tree in shared memory. All invocations get the result.
var<workgroup> lanes: array<f32, GROUP>;

fn tree_sum(value: f32, own: u32) -> f32 {
  lanes[own] = value;
  for (var half_of = GROUP / 2u; half_of > 0u; half_of /= 2u) {
    workgroupBarrier();
    if (own < half_of) { lanes[own] += lanes[own + half_of]; }
  }
  workgroupBarrier();
  let total = lanes[0];
  workgroupBarrier();
  return total;
}

fn tree_max(value: f32, own: u32) -> f32 {
  lanes[own] = value;
  for (var half_of = GROUP / 2u; half_of > 0u; half_of /= 2u) {
    workgroupBarrier();
    if (own < half_of) { lanes[own] = max(lanes[own], lanes[own + half_of]); }
  }
  workgroupBarrier();
  let most = lanes[0];
  workgroupBarrier();
  return most;
}
