// Product of two matrices: a work-group of 16 x 16 invocations computes TILE x TILE results, an invocation four rows of
// four columns. DEPTH terms at a time are in shared memory. `share` matrices of the first array use one of the second,
// as query heads share a key head. A long sum is computed in several dispatches, with results so far in `sums`.
struct Options {
  groups: u32, rows: u32, columns: u32, depth: u32, share: u32, first: u32, end: u32, scale: f32, a_transposed: u32,
  b_transposed: u32,
}

const DEPTH = 16u;
const TILES_IN_PART = 16u;  // a long sum is added in parts, as LongSum
var<workgroup> left: array<f32, DEPTH * TILE>;
var<workgroup> right: array<f32, DEPTH * TILE>;

// Four values of a tile are neighbours in memory: along the depth, or across it.
fn fill_left(matrix: u32, m: u32, k: u32, own: u32) {
  if (options.a_transposed == 0u) {
    let row = own / 4u;
    let at = own % 4u * 4u;
    var values = vec4(0.0);
    if (m + row < options.rows && k + at < options.end) {
      values = first_of(load4_a(matrix + (m + row) * options.depth + k + at), options.end - k - at, 0.0);
    }
    for (var n = 0u; n < 4u; n++) { left[(at + n) * TILE + row] = values[n]; }
  } else {
    let at = own / 16u;
    let row = own % 16u * 4u;
    var values = vec4(0.0);
    if (k + at < options.end && m + row < options.rows) {
      values = first_of(load4_a(matrix + (k + at) * options.rows + m + row), options.rows - m - row, 0.0);
    }
    for (var n = 0u; n < 4u; n++) { left[at * TILE + row + n] = values[n]; }
  }
}

fn fill_right(matrix: u32, n: u32, k: u32, own: u32) {
  if (options.b_transposed != 0u) {
    let column = own / 4u;
    let at = own % 4u * 4u;
    var values = vec4(0.0);
    if (n + column < options.columns && k + at < options.end) {
      values = first_of(load4_b(matrix + (n + column) * options.depth + k + at), options.end - k - at, 0.0);
    }
    for (var i = 0u; i < 4u; i++) { right[(at + i) * TILE + column] = values[i]; }
  } else {
    let at = own / 16u;
    let column = own % 16u * 4u;
    var values = vec4(0.0);
    if (k + at < options.end && n + column < options.columns) {
      values = first_of(load4_b(matrix + (k + at) * options.columns + n + column), options.columns - n - column, 0.0);
    }
    for (var i = 0u; i < 4u; i++) { right[at * TILE + column + i] = values[i]; }
  }
}

fn four_of_right(at: u32) -> vec4<f32> { return vec4(right[at], right[at + 1u], right[at + 2u], right[at + 3u]); }

fn finish_row(row: u32, column: u32, matrix: u32, sum: vec4<f32>) {
  if (row >= options.rows || column >= options.columns) { return; }
  let at = (matrix * options.rows + row) * options.columns + column;
  let count = options.columns - column;
  var total = sum;
  if (options.first > 0u) {
    total.x += sums[at];
    if (count > 1u) { total.y += sums[at + 1u]; }
    if (count > 2u) { total.z += sums[at + 2u]; }
    if (count > 3u) { total.w += sums[at + 3u]; }
  }
  if (options.end < options.depth) { store4_sums(at, total, count); }
  else { store4_out(at, total * options.scale, count); }
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) counts: vec3<u32>,
        @builtin(local_invocation_index) own: u32) {
  let index = index_of(group, counts);
  if (index >= options.groups) { return; }
  let across = (options.columns + TILE - 1u) / TILE;
  let down = (options.rows + TILE - 1u) / TILE;
  let matrix = index / across / down;
  let m = index / across % down * TILE;
  let n = index % across * TILE;
  let row = own / 16u * 4u;
  let column = own % 16u * 4u;
  let a_start = matrix * options.rows * options.depth;
  let b_start = matrix / options.share * options.depth * options.columns;
  var totals = mat4x4<f32>();
  var part = mat4x4<f32>();
  for (var k = options.first; k < options.end; k += DEPTH) {
    fill_left(a_start, m, k, own);
    fill_right(b_start, n, k, own);
    workgroupBarrier();
    for (var i = 0u; i < DEPTH; i++) {
      let values = four_of_right(i * TILE + column);
      let at = i * TILE + row;
      part[0] += left[at] * values;
      part[1] += left[at + 1u] * values;
      part[2] += left[at + 2u] * values;
      part[3] += left[at + 3u] * values;
    }
    workgroupBarrier();
    if (k / DEPTH % TILES_IN_PART == TILES_IN_PART - 1u) {
      totals += part;
      part = mat4x4<f32>();
    }
  }
  totals += part;
  finish_row(m + row, n + column, matrix, totals[0]);
  finish_row(m + row + 1u, n + column, matrix, totals[1]);
  finish_row(m + row + 2u, n + column, matrix, totals[2]);
  finish_row(m + row + 3u, n + column, matrix, totals[3]);
}
