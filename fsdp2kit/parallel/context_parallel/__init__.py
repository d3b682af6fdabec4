"""Context parallelism: every rank runs the model on its slice of each sequence; attention sees the whole sequence.

Everything in a transformer but attention treats tokens one by one, so a rank can run it on S/cp of them. For
attention there are three methods (`choose` picks one, `exchange` does the communication):

**ulysses** (arXiv:2309.14509) trades the split over the sequence for a split over the heads and back. Between the two
exchanges any attention implementation of transformers runs on whole sequences, with whole masks.

        sequence split                                    head split
    rank 0  [h0 h1 h2 h3] × tokens 0–3   all-to-all   rank 0  [h0 h1] × tokens 0–7
    rank 1  [h0 h1 h2 h3] × tokens 4–7   ←───────→    rank 1  [h2 h3] × tokens 0–7

**ring** (arXiv:2310.01889) leaves queries where they are. Blocks of keys and values go round, and each rank merges the
result for the current block into its result so far.

             step 0      step 1      step 2      step 3
    rank 0   q0 · kv0    q0 · kv3    q0 · kv2    q0 · kv1
    rank 1   q1 · kv1    q1 · kv0    q1 · kv3    q1 · kv2        kv blocks move down a rank a step,
    rank 2   q2 · kv2    q2 · kv1    q2 · kv0    q2 · kv3        while the block before them is worked on
    rank 3   q3 · kv3    q3 · kv2    q3 · kv1    q3 · kv0

**allgather** (arXiv:2407.21783) lets every rank gather all keys and values, in one collective; few key/value heads
make that cheap. Gradients of keys and values go back by reduce-scatter.

    rank 0   q0 · [kv0 kv1 kv2 kv3]
    rank 1   q1 · [kv0 kv1 kv2 kv3]   …

Under causal attention late tokens cost more: token t looks at t + 1 keys. With the sequence cut into cp stretches,
the last rank would do nearly twice the average work while the others wait. Ring and allgather therefore divide it
**zigzag**: 2·cp chunks, of which a rank gets one from the head and its mirror image from the tail.

    cp = 4, chunks       0    1    2    3    4    5    6    7
    held by rank         0    1    2    3    3    2    1    0
    keys that it sees    1    2    3    4    5    6    7    8      chunks: nine for each rank

The files, from data to kernel: `layout` says which tokens a rank holds; `segments` turns what a query may see (its
own document, nothing after it, a window) into rectangles, on the host, so that nothing else is computed; `batch`
slices a micro-batch and gives it its masks, segments or borders; `attention` is called by transformers' layers;
`exchange` brings the keys, or trades heads; `kernels` computes one block of keys and merges it into the result;
`flash` says which FlashAttention does so on CUDA, and tries it on the device. Layers that carry a state along the
sequence are another matter: `recurrent`, with `borders` and `recurrent_checks`.
"""
