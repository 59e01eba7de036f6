"""Every knob of a RankBuffer run, on top of TRL's `GRPOConfig`, checked before anything is loaded."""

from dataclasses import dataclass, field

from trl import GRPOConfig

from .judge import Judge, RubricJudge
from .judge.openai_client import OpenAIClient
from .rewards.format import check_format
from .rewards.rankbuffer import RankBuffer


@dataclass
class RankBufferConfig(GRPOConfig):
    r"""
    Configuration class for the [`RankBufferTrainer`].

    It adds the parameters below to those of TRL's [`~trl.GRPOConfig`], whose defaults it leaves alone. Defaults are
    the paper's, except that no format is required (`format_check`).

    Parameters:
        > Parameters that control the buffer

        k0 (`int`, *optional*, defaults to `4`):
            Initial number of anchors `K0` of a query.
        prune_after (`int`, *optional*, defaults to `3`):
            `H`: an internal anchor is pruned after this many inactive epochs in a row.
        refine_at (`int`, *optional*, defaults to `3`):
            An internal interval with at least this many rollouts adds its lower median as an anchor.
        buffer_init (`str`, *optional*, defaults to `"responses"`):
            Where the first anchors come from: `"responses"` (the data set's ranked responses; Nectar in the paper) or
            `"bootstrap"` (the query's first ranked group).
        static_buffer (`bool`, *optional*, defaults to `False`):
            Freeze the buffers at the end of epoch 0 (the starred variants of the paper).

        > Parameters that control the ranking

        fine_ranking (`bool`, *optional*, defaults to `True`):
            Rank the rollouts of one interval among themselves. `False` is the coarse-only ablation.
        anchor_content (`bool`, *optional*, defaults to `True`):
            Show the anchors' text to the coarse judge. `False` is the order-only ablation.

        > Parameters that control the judge

        judge_url (`str`, *optional*):
            Base URL of an OpenAI-compatible server, such as `http://127.0.0.1:8001/v1`. Without it the embedded rubric
            judge answers, which needs no model.
        judge_model (`str`, *optional*):
            Name under which that server serves the judge.
        judge_api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the server's key, if it wants one. Keys never stand in a config.
        judge_max_tokens (`int`, *optional*, defaults to `256`):
            Limit on the tokens of one verdict.
        judge_timeout (`float`, *optional*, defaults to `120.0`):
            Seconds for one request. Keep judging a step well below `ddp_timeout`, since the other processes wait for
            it.
        judge_max_retries (`int`, *optional*, defaults to `4`):
            Transport retries of one request, with backoff and jitter.
        judge_max_attempts (`int`, *optional*, defaults to `3`):
            How often a question is put when its answers are malformed.
        judge_concurrency (`int`, *optional*, defaults to `64`):
            Judgments in flight at once.
        judge_max_failures (`float`, *optional*, defaults to `0.25`):
            Share of a step's judgments, in 0..1, above which failures stop the run.

        > Parameters that control prompts and answers

        format_check (`str`, *optional*, defaults to `"none"`):
            The format a completion must have: `"think"` (one closed `<think>` block, then an answer; the paper's),
            `"none"`, or a regular expression for the whole text, whose group `answer` is the answer. The judge sees
            the answer alone.
        format_weight (`float`, *optional*, defaults to `0.2`):
            Weight of the format reward (0 or 1) beside the rank reward in [-1, 1].
        max_prompt_length (`int`, *optional*):
            Longest rendered prompt in tokens; a longer one is refused at start. Default: not checked.
    """

    k0: int = field(default=4, metadata={"help": "Initial number of anchors K0 of a query."})
    prune_after: int = field(
        default=3, metadata={"help": "H: an internal anchor is pruned after this many inactive epochs in a row."}
    )
    refine_at: int = field(
        default=3,
        metadata={"help": "An internal interval with at least this many rollouts adds its lower median as an anchor."},
    )
    buffer_init: str = field(
        default="responses",
        metadata={
            "help": "Where the first anchors come from: the data set's responses, or the query's first ranked group.",
            "choices": ["responses", "bootstrap"],
        },
    )
    static_buffer: bool = field(default=False, metadata={"help": "Freeze the buffers at the end of epoch 0."})
    fine_ranking: bool = field(
        default=True, metadata={"help": "Rank the rollouts of one interval among themselves. False is coarse-only."}
    )
    anchor_content: bool = field(
        default=True, metadata={"help": "Show the anchors' text to the coarse judge. False is order-only."}
    )
    judge_url: str | None = field(
        default=None,
        metadata={"help": "Base URL of an OpenAI-compatible judge server. Default: the embedded rubric judge."},
    )
    judge_model: str | None = field(default=None, metadata={"help": "Name under which the server serves the judge."})
    judge_api_key_env: str = field(
        default="OPENAI_API_KEY", metadata={"help": "Environment variable that holds the judge server's key."}
    )
    judge_max_tokens: int = field(default=256, metadata={"help": "Limit on the tokens of one verdict."})
    judge_timeout: float = field(default=120.0, metadata={"help": "Seconds for one request to the judge."})
    judge_max_retries: int = field(default=4, metadata={"help": "Transport retries of one request."})
    judge_max_attempts: int = field(
        default=3, metadata={"help": "How often a question is put when its answers are malformed."}
    )
    judge_concurrency: int = field(default=64, metadata={"help": "Judgments in flight at once."})
    judge_max_failures: float = field(
        default=0.25, metadata={"help": "Share of a step's judgments above which failures stop the run."}
    )
    format_check: str = field(
        default="none",
        metadata={
            "help": "Required format: 'think', 'none', or a regular expression with an optional group 'answer'."
        },
    )
    format_weight: float = field(default=0.2, metadata={"help": "Weight of the format reward beside the rank reward."})
    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Longest rendered prompt in tokens; a longer one is refused at start."}
    )

    def __post_init__(self):
        super().__post_init__()
        at_least = {
            "k0": 2,
            "prune_after": 1,
            "refine_at": 1,
            "judge_max_tokens": 1,
            "judge_max_retries": 0,
            "judge_max_attempts": 1,
            "judge_concurrency": 1,
            "format_weight": 0,
        }
        for key, least in at_least.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, got {getattr(self, key)}")
        if self.judge_timeout <= 0:
            raise ValueError(f"judge_timeout must be above 0 seconds, got {self.judge_timeout}")
        if not 0 <= self.judge_max_failures <= 1:
            raise ValueError(f"judge_max_failures is a share in 0..1, got {self.judge_max_failures}")
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1 token, got {self.max_prompt_length}")
        if self.buffer_init not in ("responses", "bootstrap"):
            raise ValueError(f"buffer_init must be 'responses' or 'bootstrap', got {self.buffer_init!r}")
        if self.judge_url is not None and not self.judge_url.startswith(("http://", "https://")):
            raise ValueError(f"judge_url must start with http:// or https://, got {self.judge_url!r}")
        if self.judge_url is not None and not self.judge_model:
            raise ValueError(f"judge_url is {self.judge_url!r} but judge_model is not set: name the model it serves")
        if self.judge_url is None and self.judge_model:
            raise ValueError(f"judge_model is {self.judge_model!r} but judge_url is not set: say where it is served")
        check_format(self.format_check)
        if self.reward_weights is not None:
            raise ValueError(
                "reward_weights is set by RankBufferTrainer (rank 1.0, format format_weight); set format_weight"
            )
        self._check_save_steps()

    def _check_save_steps(self) -> None:
        """A resumed run generates anew at once, so a checkpoint inside a generation would score its queries twice."""
        generation = self.steps_per_generation * self.num_iterations  # micro steps that use one generation
        step = self.gradient_accumulation_steps  # micro steps in one optimizer step
        if self.save_strategy != "steps" or step % generation == 0:
            return
        if generation % step or self.save_steps % (generation // step):
            raise ValueError(
                f"save_steps={self.save_steps:g} would save inside a generation, and that cannot be resumed exactly:"
                f" one generation lasts steps_per_generation * num_iterations / gradient_accumulation_steps ="
                f" {generation / step:g} steps. Choose a multiple of it."
            )

    def method(self) -> RankBuffer:
        """The reward method with its parameters."""
        return RankBuffer(
            k0=self.k0,
            prune_after=self.prune_after,
            refine_at=self.refine_at,
            bootstrap=self.buffer_init == "bootstrap",
            static=self.static_buffer,
            fine=self.fine_ranking,
            anchor_content=self.anchor_content,
        )

    def judge(self) -> Judge:
        """The judge that this configuration names."""
        client = RubricJudge()
        if self.judge_url is not None:
            client = OpenAIClient(
                self.judge_url,
                self.judge_model,
                api_key_env=self.judge_api_key_env,
                max_tokens=self.judge_max_tokens,
                timeout=self.judge_timeout,
                max_retries=self.judge_max_retries,
            )
        return Judge(client, max_attempts=self.judge_max_attempts, concurrency=self.judge_concurrency)
