"""A solution of chapter 14's exercises."""


def bubble(stages: int, microbatches: int) -> float:
    return (stages - 1) / (microbatches + stages - 1)


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[str]:
    first = min(stages - 1 - stage, microbatches)
    order = [f"F{number}" for number in range(first)]
    for number in range(microbatches - first):
        order += [f"F{first + number}", f"B{number}"]
    return order + [f"B{number}" for number in range(microbatches - first, microbatches)]
