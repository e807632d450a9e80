"""One engine for everything that is chosen by measuring: candidates in, a verdict out, remembered and explained.

    question = Question.of("quantized product", "int4 weights 1536x384, 1 row", "cpu", shape="1536x384", rows=1)
    verdict = recall(question) or remember(measure(question, candidates, check))
    print(verdict.chosen, verdict.explain())

    engine      Candidate, Ready, measure: every answer is checked, the right ones are timed in turns within a bound
    stopwatch   how a device is timed; the devices' own clocks are in `devices.stopwatch` and `gpu.profile`
    answers     checks of arrays and tensors: shape, dtype, finite, near enough, inputs untouched
    verdict     Question, Trial, Verdict and the rule that decides
    store       one file per question in the cache folder
    machine     the key of this machine

It knows no device and imports no torch: whoever measures brings candidates, a check and a stopwatch.
"""
