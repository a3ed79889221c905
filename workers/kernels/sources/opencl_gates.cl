// What is computed value by value: SiLU, SwiGLU, rotary embedding. A work-item has EACH neighbouring values.

kernel void silu(const global T *x, global T *out, long count) {
  long i = get_global_id(0) * (long)EACH, end = min(count, i + EACH);
#if EACH >= 16
  for (; i + 16 <= end; i += 16) {
    float16 v = LOAD16(x, i);
    STORE16(v / (1.0f + exp(-v)), out, i);
  }
#endif
  for (; i < end; i++) {
    float v = LOAD(x, i);
    STORE(v / (1.0f + exp(-v)), out, i);
  }
}

kernel void swiglu(const global T *gate, const global T *up, global T *out, long count) {
  long i = get_global_id(0) * (long)EACH, end = min(count, i + EACH);
#if EACH >= 16
  for (; i + 16 <= end; i += 16) {
    float16 v = LOAD16(gate, i);
    STORE16(v / (1.0f + exp(-v)) * LOAD16(up, i), out, i);
  }
#endif
  for (; i < end; i++) {
    float v = LOAD(gate, i);
    STORE(v / (1.0f + exp(-v)) * LOAD(up, i), out, i);
  }
}

// An item turns one pair of a token, or copies one of the values beside the pairs. `out` may be `x`.
kernel void rope(const global T *x, const global W *cosines, const global W *sines, global T *out, long length,
                 long width, long pairs, long position, int neighbours) {
  long per_token = width - pairs, item = get_global_id(0) % per_token, token = get_global_id(0) / per_token;
  x += token * width, out += token * width;
  if (item >= pairs) {
    STORE(LOAD(x, item + pairs), out, item + pairs);
    return;
  }
  long first = neighbours ? 2 * item : item, second = neighbours ? first + 1 : item + pairs;
  long at = (token % length + position) * pairs + item;
  float a = LOAD(x, first), b = LOAD(x, second), c = LOAD_W(cosines, at), s = LOAD_W(sines, at);
  STORE(a * c - b * s, out, first);
  STORE(b * c + a * s, out, second);
}
