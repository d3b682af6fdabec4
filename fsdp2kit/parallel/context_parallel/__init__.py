"""Context parallelism: every rank runs the model on its part of each sequence; attention sees the whole.

Everything in a transformer but attention treats tokens one by one, so a rank can run it on S/cp of them. For
attention, Ulysses (arXiv:2309.14509) trades the split over the sequence for a split over the heads and back:

        sequence split                      head split
    rank 0  [h0 h1 h2 h3] × tokens 0–3      rank 0  [h0 h1] × tokens 0–7
    rank 1  [h0 h1 h2 h3] × tokens 4–7      rank 1  [h2 h3] × tokens 0–7
                 └──── all-to-all (q, k, v) ────┘
                 ┌──── all-to-all (output)  ────┐

Between the two exchanges, any attention implementation of transformers runs on the whole sequence with the
whole mask, so packing and sliding windows come out exactly as they do on one rank.
"""
