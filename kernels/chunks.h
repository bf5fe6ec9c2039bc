// The chunks of positions that an attention is cut into: `least` positions each below FIRST_CHUNKS, twice as many from there to
// twice that position, and so on, up to `most`. They depend on the position alone, so that bits depend neither on the length of a
// context, nor on the rows of a verify, nor on the machine.

constant constexpr int FIRST_CHUNKS = 1024;

// Of the equal chunks among which a chunk is, or a position (the other is NONE): the first one, its position, and their size.
constant constexpr int NONE = 0x7fffffff;

METAL_FUNC int3 chunks_like(int chunk, int position, int least, int most) {
  int3 run(0, 0, least);
  for (int end = FIRST_CHUNKS; run.z < most && position >= end; end *= 2) {
    const int next = run.x + (end - run.y) / run.z;
    if (chunk < next) {
      break;
    }
    run = int3(next, end, 2 * run.z);
  }
  return run;
}
