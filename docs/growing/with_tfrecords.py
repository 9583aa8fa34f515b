"""A store of samples that grows, on TFRecord files: one shard a download, each epoch over the shards that are there.

    python with_tfrecords.py dali FOLDER          (or: tensorflow)

Shards are written here by hand, so that neither library is needed for that; a fetcher of your own would write them.
"""

import struct
import sys
from pathlib import Path

import numpy as np

POLYNOMIAL = 0x82F63B78
"""Of crc32c, reversed; RFC 3720, appendix B.4."""


def write_shard(path, samples):
    """Write float32 samples as a shard of tf.train.Example records, under its name only once it is whole.

    Beside it goes what DALI wants to know: place and size of each record, a line each.
    """
    unfinished, index = path.with_suffix(".part"), []
    with unfinished.open("wb") as file:
        for sample in samples:
            example = as_example(np.ascontiguousarray(sample, dtype="<f4").tobytes())
            length = struct.pack("<Q", len(example))
            index.append((file.tell(), len(example) + 16))
            file.write(length + masked_crc(length) + example + masked_crc(example))
    path.with_suffix(".idx").write_text("".join(f"{place} {size}\n" for place, size in index))
    unfinished.rename(path)


def as_example(values):
    """Return bytes as a tf.train.Example with one feature "x", by the protocol buffers encoding."""
    bytes_list = field(1, field(1, values))  # Feature.bytes_list.value
    return field(1, field(1, field(1, b"x") + field(2, bytes_list)))  # Example.features.feature["x"]


def field(number, content):
    """Return a length-delimited field of a protocol buffers message."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + content


def masked_crc(content):
    """Return the checksum that follows each part of a record."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def table():
    """Return crc32c of each byte."""
    remainders = list(range(256))
    for _ in range(8):
        remainders = [r >> 1 ^ POLYNOMIAL * (r & 1) for r in remainders]
    return remainders


TABLE = table()


def read_by_dali(shards, batch_size, seed):
    """Give an epoch over shards, in shuffled batches of shape (n, values): read and parsed by DALI's C++ threads."""
    from nvidia.dali import fn, pipeline_def, tfrecord, types

    n_samples = sum(len(shard.with_suffix(".idx").read_text().splitlines()) for shard in shards)

    @pipeline_def(batch_size=batch_size, num_threads=2, device_id=None, seed=seed)
    def pipeline():
        records = fn.readers.tfrecord(
            path=[str(shard) for shard in shards],
            index_path=[str(shard.with_suffix(".idx")) for shard in shards],
            features={"x": tfrecord.FixedLenFeature((), tfrecord.string, "")},
            random_shuffle=True,
            initial_fill=n_samples,
        )
        return fn.reinterpret(records["x"], dtype=types.FLOAT)

    pipe = pipeline()
    pipe.build()
    for start in range(0, n_samples, batch_size):
        (batch,) = pipe.run()
        yield np.asarray(batch.as_tensor())[: n_samples - start]  # the last batch is filled up by the next epoch


def read_by_tensorflow(shards, batch_size, seed):
    """Give an epoch over shards, in shuffled batches of shape (n, values): read and parsed by TensorFlow's threads."""
    import tensorflow as tf

    def parse(record):
        example = tf.io.parse_single_example(record, {"x": tf.io.FixedLenFeature([], tf.string)})
        return tf.io.decode_raw(example["x"], tf.float32)

    names = tf.data.Dataset.from_tensor_slices([str(shard) for shard in shards]).shuffle(len(shards), seed=seed)
    records = names.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
    batches = records.shuffle(1024, seed=seed).map(parse, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size)
    for batch in batches.prefetch(tf.data.AUTOTUNE):
        yield batch.numpy()


READERS = {"dali": read_by_dali, "tensorflow": read_by_tensorflow}


def main(library, folder, n_epochs=3):
    """Train on what is there when an epoch begins; the oldest shards make room when there are more than two."""
    folder, fresh = Path(folder), np.random.default_rng(0)
    for epoch in range(n_epochs):
        write_shard(folder / f"{epoch:06d}.tfrecord", fresh.standard_normal((40, 64), dtype=np.float32))
        shards = sorted(folder.glob("*.tfrecord"))
        n_samples = sum(len(batch) for batch in READERS[library](shards, batch_size=16, seed=epoch))
        print(f"epoch {epoch}: {n_samples} samples in {len(shards)} shards")
        for shard in shards[:-2]:  # between epochs, when nobody reads it
            shard.unlink()
            shard.with_suffix(".idx").unlink()


if __name__ == "__main__":
    main(*sys.argv[1:3])
