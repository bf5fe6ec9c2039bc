// The chunks of positions that an attention is cut into. They depend on the position alone, never on how many there are: so bits
// do not depend on the length of a context, on the rows of a verify, or on the machine.

// Positions below this have the smallest chunks; those up to twice it twice as large ones, and so on.
constant constexpr int FIRST_CHUNKS = 1024;

struct Chunks {
  int least, most; // positions of the smallest and the largest

  // The chunk that holds a position.
  METAL_FUNC int holding(int position) const thread {
    int chunk = 0, begin = 0, size = least;
    for (int end = FIRST_CHUNKS; size < most && position >= end; end *= 2) {
      chunk += (end - begin) / size;
      begin = end;
      size *= 2;
    }
    return chunk + (position - begin) / size;
  }

  // The position that a chunk begins at.
  METAL_FUNC int begin(int chunk) const thread {
    int begin = 0, size = least;
    for (int end = FIRST_CHUNKS; size < most && chunk >= (end - begin) / size; end *= 2) {
      chunk -= (end - begin) / size;
      begin = end;
      size *= 2;
    }
    return begin + chunk * size;
  }
};
