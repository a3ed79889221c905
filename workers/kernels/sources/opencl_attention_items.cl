// Attention, a row of a head per work-item, for devices whose work-items are threads: sixteen keys at a time, with the
// greatest score so far taken out of sums that began with a smaller one. `kept_sums` has a row of floats for each item.

float shown(float score, const global void *mask, int kind, long at) {
  if (kind == MASK_BOOL) return ((const global uchar *)mask)[at] ? score : -INFINITY;
  if (kind == MASK_F32) return score + ((const global float *)mask)[at];
  return kind == MASK_T ? score + LOAD((const global T *)mask, at) : score;
}

kernel void attention(const global T *q, const global T *k, const global T *v, const global void *mask, global T *out,
                      global float *lse, global float *kept_sums, long length, long many, long heads, long groups,
                      long width, long wide, float scale, int causal, int kind, long by_batch, long by_head,
                      long by_row, long by_key, int has_lse) {
  long item = get_global_id(0), t = item % length, h = item / length % heads, b = item / length / heads;
  long kept = (b * groups + h / (heads / groups)) * many, seen = causal ? min(many, t + many - length + 1) : many;
  global float *sums = kept_sums + item * wide;
  q += item * width, k += kept * width, v += kept * wide, out += item * wide;
  long at = b * by_batch + h * by_head + t * by_row;
  float top = -INFINITY, total = 0.0f;
  for (long e = 0; e < wide; e++) sums[e] = 0.0f;
  for (long s = 0; s < seen; s += 16) {
    int count = min(16L, seen - s);
    float p[16], before = top;
    for (int i = 0; i < count; i++) {
      p[i] = shown(dot_of(q, k + (s + i) * width, width) * scale, mask, kind, at + (s + i) * by_key);
      top = fmax(top, p[i]);
    }
    float shrink = before == -INFINITY ? 0.0f : exp(before - top);
    total *= shrink;
    for (int i = 0; i < count; i++) total += p[i] = p[i] == -INFINITY ? 0.0f : exp(p[i] - top);
    const global T *rows = v + s * wide;
    long e = 0;
    for (; e + 16 <= wide; e += 16) {
      float16 sum = vload16(0, sums + e) * shrink;
      for (int i = 0; i < count; i++) sum += p[i] * LOAD16(rows, i * wide + e);
      vstore16(sum, 0, sums + e);
    }
    for (; e < wide; e++) {
      float sum = sums[e] * shrink;
      for (int i = 0; i < count; i++) sum += p[i] * LOAD(rows, i * wide + e);
      sums[e] = sum;
    }
  }
  for (long e = 0; e < wide; e++) STORE(total == 0.0f ? 0.0f : sums[e] / total, out, e);
  if (has_lse) lse[item] = total == 0.0f ? -INFINITY : top + log(total);
}
