"""Answers from a choice, of a regular expression, of a schema, of a grammar, and with the names of older releases."""

import sys
from enum import StrEnum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams


class Kind(StrEnum):
    sedan = "sedan"
    truck = "truck"


class Car(BaseModel):
    doors: bool
    kind: Kind


SQL = """
root ::= "SELECT " column " from " table
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
"""


def main():
    llm = LLM(model=sys.argv[1], max_model_len=200)
    constraints = [
        StructuredOutputsParams(choice=["Positive", "Negative"]),
        StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
        StructuredOutputsParams(json=Car.model_json_schema(), disable_additional_properties=True),
        StructuredOutputsParams(grammar=SQL),
    ]
    for constraint in constraints:
        params = SamplingParams(structured_outputs=constraint, temperature=0.0, max_tokens=50)
        print(repr(llm.generate("Is it wonderful?", sampling_params=params)[0].outputs[0].text))
    guided = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"]), temperature=0.0)
    print(repr(llm.generate("Is it wonderful?", guided)[0].outputs[0].text))


if __name__ == "__main__":
    main()
