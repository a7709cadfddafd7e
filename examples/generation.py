"""Generated texts collected on rank 0, in the order of their prompts.

Texts have different lengths, and ranks finish different numbers of them. They travel as strings,
without padding or token ids, together with any other plain data (scores, dicts).

    unisono run -n 4 examples/generation.py
"""

import unisono
from unisono.training import gather_in_order

PROMPTS = ["one", "two", "three", "four", "five", "six", "seven"]


def generate(prompt: str) -> dict[str, object]:
    """A model that repeats the prompt as often as it has letters."""
    text = " ".join([prompt] * len(prompt)) + " …"
    return {"prompt": prompt, "text": text, "score": 1 / len(text)}


def main() -> None:
    comm = unisono.init()
    mine = range(comm.rank, len(PROMPTS), comm.size)  # some ranks have one more than others
    outputs = [generate(PROMPTS[index]) for index in mine]

    everything = gather_in_order(outputs, mine, len(PROMPTS))
    if comm.rank == 0:
        assert everything == [generate(prompt) for prompt in PROMPTS], "texts are lost or mixed up"
        for output in everything:
            print(f"{output['prompt']}: {output['text']}")
    else:
        assert everything is None, f"rank {comm.rank} got what was for rank 0"

    by_rank = unisono.gather_object([output["text"] for output in outputs])
    if comm.rank == 0:  # without indices: in rank order
        assert by_rank is not None
        assert [len(texts) for texts in by_rank] == [
            len(PROMPTS[rank :: comm.size]) for rank in range(comm.size)
        ], "a rank's texts are missing"
    unisono.shutdown()


if __name__ == "__main__":
    main()
