// Attention, a work-group per row of a head: GROUP keys at a time, an invocation for each; then `across` invocations
// beside each other for the values of the result, four each, and the others for further keys. `state` has for each row
// the sums of its values, the greatest score and the sum of exponentials: keys `first` to `end` are computed in one
// dispatch, and more of them in the next.
struct Options {
  groups: u32, length: u32, many: u32, heads: u32, key_heads: u32, width: u32, value_width: u32, first: u32, end: u32,
  scale: f32, causal: u32, mask_kind: u32, by_batch: u32, by_head: u32, by_row: u32, by_key: u32, has_lse: u32,
  across: u32,
}

var<workgroup> shares: array<f32, GROUP>;
var<workgroup> sums_of: array<vec4<f32>, GROUP>;

fn masked(score: f32, i: u32) -> f32 {
  if (options.mask_kind == 0u) { return score; }
  if (options.mask_kind == 1u) { return select(minus_infinity(), score, load_mask(i) != 0.0); }
  return score + load_mask(i);
}

fn score_of(query: u32, key: u32) -> f32 {
  var sum = vec4(0.0);
  let width = options.width;
  for (var d = 0u; d < width; d += 4u) {
    sum += first_of(load4_q(query + d), width - d, 0.0) * first_of(load4_k(key + d), width - d, 0.0);
  }
  return sum4(sum) * options.scale;
}

// Add the values of `count` keys to the row's sums: four at `e`. The invocations for one `e` have different keys, and a
// tree adds theirs.
fn add_values(values: u32, row_state: u32, e: u32, count: u32, shrink: f32, own: u32) {
  let across = options.across;
  var sum = vec4(0.0);
  if (e < options.value_width) {
    for (var i = own / across; i < count; i += GROUP / across) {
      sum += shares[i] * load4_v(values + i * options.value_width + e);
    }
  }
  sums_of[own] = sum;
  for (var half_of = GROUP / 2u; half_of >= across; half_of /= 2u) {
    workgroupBarrier();
    if (own < half_of) { sums_of[own] += sums_of[own + half_of]; }
  }
  if (own < across && e < options.value_width) {
    let at = row_state + e;
    let before = vec4(state[at], state[at + 1u], state[at + 2u], state[at + 3u]);
    store4_state(at, before * shrink + sums_of[own], options.value_width - e);
  }
  workgroupBarrier();
}

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let t = index % options.length;
  let head = index / options.length % options.heads;
  let batch = index / options.length / options.heads;
  let key_head = batch * options.key_heads + head / (options.heads / options.key_heads);
  let keys = key_head * options.many;
  var visible = options.many;
  if (options.causal != 0u) {
    visible = u32(clamp(i32(t + options.many) - i32(options.length) + 1, 0, i32(options.many)));
  }
  let end = min(visible, options.end);
  let mask_row = batch * options.by_batch + head * options.by_head + t * options.by_row;
  let wide = options.value_width;
  let row_state = index * (wide + 2u);
  var most = minus_infinity();
  var total = 0.0;
  if (options.first > 0u) {
    most = state[row_state + wide];
    total = state[row_state + wide + 1u];
  } else {
    for (var e = own; e < wide; e += GROUP) { store_state(row_state + e, 0.0); }
    storageBarrier();
  }
  for (var s = options.first; s < end; s += GROUP) {
    let count = min(GROUP, end - s);
    var score = minus_infinity();
    if (own < count) {
      let scaled = score_of(index * options.width, (keys + s + own) * options.width);
      score = masked(scaled, mask_row + (s + own) * options.by_key);
    }
    let before = most;
    most = max(most, tree_max(score, own));
    let shrink = select(exp_of(before - most), 0.0, is_minus_infinity(before));
    let share = select(exp_of(score - most), 0.0, is_minus_infinity(score));
    shares[own] = share;
    total = total * shrink + tree_sum(share, own);
    for (var block = 0u; block < wide; block += options.across * 4u) {
      add_values((keys + s) * wide, row_state, block + own % options.across * 4u, count, shrink, own);
    }
  }
  storageBarrier();
  if (options.end < options.many) {
    if (own == 0u) {
      store_state(row_state + wide, most);
      store_state(row_state + wide + 1u, total);
    }
    return;
  }
  for (var e = own; e < wide; e += GROUP) {
    store_out(index * wide + e, select(state[row_state + e] / total, 0.0, total == 0.0));
  }
  if (options.has_lse != 0u && own == 0u) {
    store_lse(index, select(most + log(total), minus_infinity(), total == 0.0));
  }
}
