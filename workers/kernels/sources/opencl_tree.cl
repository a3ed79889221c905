// Sums and the greatest of a work-group's values, by a tree in local memory. All items of the group get the result.

float tree_sum(float value, local float *lanes) {
  int own = get_local_id(0);
  lanes[own] = value;
  for (int half_of = GROUP / 2; half_of; half_of /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (own < half_of) lanes[own] += lanes[own + half_of];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  float total = lanes[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  return total;
}

float tree_max(float value, local float *lanes) {
  int own = get_local_id(0);
  lanes[own] = value;
  for (int half_of = GROUP / 2; half_of; half_of /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (own < half_of) lanes[own] = fmax(lanes[own], lanes[own + half_of]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  float most = lanes[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  return most;
}
