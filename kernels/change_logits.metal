// Logits after what a sequence's rules do to them: bias, penalties, tokens and words without, and a grammar's mask.
//
// Inputs   logits [n, R, V] of T: R rows of n sequences. Row r follows the context and its sequence's first r drafts.
//          penalties [n, 3] float, sizes [n, 3] int32: repetition, presence and frequency, each over that many of the
//          newest tokens; 0 for none. context [n, C] int32, the newest last, -1 in front; drafts [n, at least R - 1] int32
//          bias [n, V] float (read where BIAS); bans [n, 2, words] int32 (BANS): bits of tokens that are excluded, and of
//          those in the first early[i] rows, early [n] int32; mask [n, R, words] int32 (MASK): bits of allowed tokens
//          Read where WORDS: entries [n, E, 4] int32: a key's start and size in keys [.] uint8, and the first and the end of
//          the ranks that are excluded where a path's bytes end with it; rank [V] int32; tails [n, L] uint8 with
//          tail_sizes [n] int32: the bytes before the drafts, the newest last; starts [V + 1] int32, texts [.] uint8: those
//          of each token
//          least [1] float: the logit of what is excluded; of what a mask forbids it is -infinity
// Output   changed [n, R, V] of T
// Template T, BIAS, BANS, MASK, WORDS
// Grid     x: 256 per 2048 tokens; y: n * R;  threadgroup (256, 1, 1)
//
// Each operation is rounded to T, and repeated for each of a token's places, as MLX's operations do.

constexpr int TILE = 2048, THREADS = 256;
threadgroup atomic_uint seen[TILE]; // bit 0: repetition, bit 1: presence, then the number of places for frequency
threadgroup int matched[THREADS];
const int R = logits_shape[1], V = logits_shape[2], C = context_shape[1], drafts_size = drafts_shape[1];
const int begin = TILE * threadgroup_position_in_grid.x, row = threadgroup_position_in_grid.y;
const int i = row / R, r = row % R, thread_id = thread_index_in_threadgroup;

for (int at = thread_id; at < TILE; at += THREADS) {
  atomic_store_explicit(&seen[at], 0u, memory_order_relaxed);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int newest[3] = {sizes[3 * i], sizes[3 * i + 1], sizes[3 * i + 2]};
const int oldest = C + r - metal::max(newest[0], metal::max(newest[1], newest[2]));
for (int j = metal::max(oldest, 0) + thread_id; j < C + r; j += THREADS) {
  const int token = j < C ? context[i * C + j] : drafts[i * drafts_size + j - C];
  const int back = C + r - j;
  if (token >= begin && token < begin + TILE) {
    const uint flags = uint(back <= newest[0]) | uint(back <= newest[1]) << 1;
    atomic_fetch_or_explicit(&seen[token - begin], flags, memory_order_relaxed);
    atomic_fetch_add_explicit(&seen[token - begin], back <= newest[2] ? 4u : 0u, memory_order_relaxed);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

uint excluded = 0; // bit k: this thread's token k
if constexpr (WORDS) {
  const int E = entries_shape[1], L = tails_shape[1];
  for (int from = 0; from < E; from += THREADS) {
    bool ends = from + thread_id < E;
    if (ends) {
      const int entry = 4 * (i * E + from + thread_id), start = entries[entry];
      int draft = r, text = 0, at = 0, left = tail_sizes[i]; // unread bytes of a draft: text to at - 1
      for (int k = entries[entry + 1] - 1; k >= 0 && ends; k--) {
        while (at == text && draft > 0) {
          draft--;
          const int token = drafts[i * drafts_size + draft];
          text = starts[token];
          at = starts[token + 1];
        }
        if (at > text) {
          at--;
          ends = texts[at] == keys[start + k];
        } else {
          left--;
          ends = left >= 0 && tails[i * L + L - tail_sizes[i] + left] == keys[start + k];
        }
      }
    }
    matched[thread_id] = ends;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int each = 0; each < metal::min(THREADS, E - from); each++) {
      if (matched[each]) {
        const int first = entries[4 * (i * E + from + each) + 2], end = entries[4 * (i * E + from + each) + 3];
        for (int k = 0; k < TILE / THREADS; k++) {
          const int token = begin + k * THREADS + thread_id;
          excluded |= token < V && rank[token] >= first && rank[token] < end ? 1u << k : 0u;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

for (int k = 0; k < TILE / THREADS; k++) {
  const int token = begin + k * THREADS + thread_id, word = token / 32, bit = token % 32;
  if (token < V) {
    T value = logits[size_t(row) * V + token];
    if constexpr (BIAS) {
      value = static_cast<T>(float(value) + float(static_cast<T>(bias[size_t(i) * V + token])));
    }
    const uint places = atomic_load_explicit(&seen[token - begin], memory_order_relaxed);
    if (places & 1) {
      const float penalty = float(static_cast<T>(penalties[3 * i])), old = float(value);
      value = static_cast<T>(old < 0.0f ? old * penalty : old / penalty);
    }
    if (places & 2) {
      value = static_cast<T>(float(value) - float(static_cast<T>(penalties[3 * i + 1])));
    }
    for (uint place = 0; place < places >> 2; place++) {
      value = static_cast<T>(float(value) - float(static_cast<T>(penalties[3 * i + 2])));
    }
    bool without = excluded >> k & 1;
    if constexpr (BANS) {
      const int words = bans_shape[2];
      const int early_words = r < early[i] ? bans[(2 * i + 1) * words + word] : 0;
      without = without || ((bans[2 * i * words + word] | early_words) >> bit & 1);
    }
    value = without ? static_cast<T>(least[0]) : value;
    if constexpr (MASK) {
      value = mask[row * mask_shape[2] + word] >> bit & 1 ? value : static_cast<T>(-INFINITY);
    }
    changed[size_t(row) * V + token] = value;
  }
}
