"""Threads that call at the same time."""


def test_threads(queue, monkeypatch):
    """Eight threads, the first call of each at the same time, into one cache and with one mapping each."""
    monkeypatch.setattr(write, "_launches", launch.LaunchCache())
    monkeypatch.setattr(launch, "_built", {})
    store.load.cache_clear()
    rng = np.random.default_rng(4)
    rounds, workers, tokens = 40, 8, 5
    blocks = workers * tokens // 4
    together = threading.Barrier(workers)
    for size in (8, 3):
        key_cache, value_cache = (sentinel((blocks, 4, 2, size), "float32") for _ in range(2))
        cases = []
        for worker in range(workers):
            key, value, _, _ = contiguous_case(rng, "float32", tokens=tokens, size=size)
            slots = rng.permutation(np.arange(worker * tokens, (worker + 1) * tokens))
            cases.append((key, value, key_cache, value_cache, slots))
        twins = Twins(queue)
        on_device = [[twins.view(array) for array in case] for case in cases]

        def work(arguments):
            together.wait()
            for _ in range(rounds):
                reshape_and_cache(*arguments)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, on_device))
        for case in cases:
            reference.reshape_and_cache(*case)
        twins.assert_equal()


def test_threads_that_write_one_slot(queue):
    """One launch, arguments of its own for each thread: every element is one of the rows'."""
    rows = [np.full((1, 2, 512), number, "float32") for number in range(1, 9)]
    key_cache, value_cache = empty_cache(2, 4, 2, 512, device=queue)
    slots = to_device(np.array([5]), queue)
    keys = [to_device(row, queue) for row in rows]

    def work(key):
        for _ in range(40):
            reshape_and_cache(key, key, key_cache, value_cache, slots)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, keys))
    for cache in (key_cache, value_cache):
        found = arrays.to_numpy(cache)
        assert set(found[1, 1].ravel()) <= set(range(1, 9))
        found[1, 1] = 0
        assert not to_bytes(found).any()
