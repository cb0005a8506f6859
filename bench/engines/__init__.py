"""The suite `engines`: targets in front of other engines, drafts inside vLLM, and the footprint of specdec itself."""
