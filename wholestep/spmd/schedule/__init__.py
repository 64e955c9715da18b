"""When collectives run and what they carry: buckets, coalescing, overlap."""
