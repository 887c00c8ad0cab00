"""Two processes that share no memory: NIXL reads int8 blocks, scales inline, out of the other's pool.

NIXL moves byte ranges. In the inline layout ``[K codes, scale, V codes, scale]`` a block is one such range,
so that nothing needs to know of scales. ``python nixl_sides.py`` runs both sides on this machine.
"""

import multiprocessing

import torch

from kvcache_dpex import torch as kv

LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, NUM_TOKENS = 4, 64, 16, 3, 64, 500
COUNT = -(-NUM_TOKENS // BLOCK_SIZE)
HALF = HEAD_SIZE + 4  # codes and a float32 scale
PATIENCE = 60


def empty_memory():
    """The blocks of all layers, and each layer's codes and scales as views of them."""
    memory = torch.zeros(LAYERS, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, 2 * HALF, dtype=torch.int8)
    layers = []
    for layer in memory:
        keys, values = layer.split(HALF, dim=-1)
        scales = [half[..., HEAD_SIZE:].view(torch.float32)[..., 0] for half in (keys, values)]
        layers.append((keys[..., :HEAD_SIZE], values[..., :HEAD_SIZE], *scales))
    return memory, layers


def write(layers, blocks):
    """A sequence of `NUM_TOKENS` tokens, the same at each call, in these blocks."""
    generator = torch.Generator().manual_seed(3)
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:NUM_TOKENS]
    for kq, vq, ks, vs in layers:
        key, value = torch.randn(2, NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE, generator=generator)
        kv.reshape_and_cache_quant(key, value, kq, vq, ks, vs, slots)


def agent_of(name, memory, blocks):
    """A NIXL agent that knows the memory, and descriptors of the blocks in it."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory(memory)
    size = memory[0, 0].nbytes
    ranges = [(layer[block].data_ptr(), size, 0) for layer in memory for block in blocks.tolist()]
    return agent, agent.get_xfer_descs(ranges, "DRAM")


def prefill(connection):
    """Write a sequence, and leave it to be read."""
    memory, layers = empty_memory()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1))[:COUNT]
    write(layers, blocks)
    agent, descriptors = agent_of("prefill", memory, blocks)
    connection.send((agent.get_agent_metadata(), agent.get_serialized_descs(descriptors)))
    connection.recv()


def decode(connection, results):
    """Read the sequence into other blocks; afterwards the memory must be as if it had been written here."""
    memory, _ = empty_memory()
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2))[:COUNT]
    agent, own = agent_of("decode", memory, blocks)
    metadata, theirs = connection.recv()
    peer = agent.add_remote_agent(metadata)
    transfer = agent.initialize_xfer("READ", own, agent.deserialize_descs(theirs), peer, b"blocks")
    state = agent.transfer(transfer)
    while state not in ("DONE", "ERR"):
        state = agent.check_xfer_state(transfer)
    expected, layers = empty_memory()
    write(layers, blocks)
    results.put((state, bool(torch.equal(memory, expected)), int(memory.count_nonzero())))
    connection.send("done")


def main():
    context = multiprocessing.get_context("spawn")
    one, other = context.Pipe()
    results = context.Queue()
    sides = [
        context.Process(target=prefill, args=(one,)),
        context.Process(target=decode, args=(other, results)),
    ]
    for side in sides:
        side.start()
    try:
        state, equal, nonzero = results.get(timeout=PATIENCE)
    finally:
        for side in sides:
            side.join(10)
            side.kill()
    print(state, "equal" if equal else "different", nonzero)


if __name__ == "__main__":
    main()
