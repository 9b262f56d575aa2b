"""Loading a configuration: what is accepted, and what each refusal says."""

from pathlib import Path

import pytest

from forge.config import QUANT_SCHEMES, Dtype, GrpoConfig, flatten, load_config, to_yaml
from forge.errors import ConfigError


def refused(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("grpo", overrides, file=file)
    return str(caught.value)


def test_defaults_compose_and_check() -> None:
    config = load_config("grpo")
    assert isinstance(config, GrpoConfig)
    assert config.trainer.dtype is Dtype.float32
    assert config.episodes_per_step == 64


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.lerning_rate=1e-5", "no key 'trainer.lerning_rate'; did you mean trainer.lr?"),
        ("trainer.temperature=1", "no key 'trainer.temperature'; did you mean sampling.temperature?"),
        ("+steps=3", "every key exists already, so + and ~ have no meaning here: write key=value"),
        ("~steps", "write key=value"),
        ("steps", "not of the form key=value"),
        ("steps=1,2", "one run takes one value"),
        ("async=2", "async is a section; set one of its keys, for example async.max_age"),
        ("async.max_age=None", "async.max_age must be a whole number, got 'None'"),
        ("name=None", "name must be text or null, got 'None' (write null for no value)"),
        ("algo.scale_by_std=on", "algo.scale_by_std must be true or false, got 'on'"),
        ("checkpoint.export=1", "checkpoint.export must be true or false, got 1"),
        ("trainer.lr=nan", "trainer.lr must be a finite number, got nan"),
        ("trainer.lr=-1", "trainer.lr must be above 0, got -1.0"),
        ("group_size=2.5", "group_size must be a whole number, got 2.5"),
        ("group_size=1", "a group of one has nothing to compare with"),
        ("seed=08", "seed must be a whole number, got '08'"),
        ("trainer.dtype=float16", "trainer.dtype must be one of bfloat16, float32, got 'float16'"),
        ("model=smolm2", "did you mean smollm2?"),
        ("model=/no/such", None),
        ("data=/no/such.jsonl", "data.path=/no/such.jsonl does not exist"),
        ("data=nosuch.jsonl", "data.path=nosuch.jsonl does not exist"),
        ("data.answer=question", "name the same column 'question'"),
        ("trainer.micro_batch=100", "more than the 64 episodes of a step (prompts_per_step=8 x group_size=8)"),
        ("sampling.max_new_tokens=512", "leaves no room for a prompt within model.max_len=512"),
        ("resume=auto", "resume=auto continues a named run"),
        ("resume=/no/such", "resume must be auto, never or the path of a checkpoint folder"),
        ("sampling.temperature=0", "sampling.temperature must be above 0"),
        ("sampling.top_p=0.9", "no key 'sampling.top_p'"),
        ("name=???", "??? has no meaning here"),
        ("seed=-1", "seed must be a whole number from 0 to 4294967295, got -1"),
        ("generator.tensor_parallel=2", "needs GPUs, but placement is cpu"),
        (
            "algo.correction=ppo",
            "algo.correction must be one of clip, tis, sequence_tis, icepop, sequence_mask, got 'ppo'",
        ),
        (
            "algo.correction_low=0",
            "algo.correction_low must be in (0, 1) and algo.correction_high above 1, got 0.0 and 2.0",
        ),
        ("algo.correction_low=1", "must be in (0, 1) and algo.correction_high above 1, got 1.0 and 2.0"),
        ("algo.correction_high=1", "must be in (0, 1) and algo.correction_high above 1, got 0.5 and 1.0"),
        ("algo.correction_high=inf", "algo.correction_high must be a finite number, got inf"),
        ("quant.scheme=int3", "fp8_dynamic; got 'int3'"),
        ("quant.scheme=x86_static", "quant.scheme must be one of none, int8_dynamic, int8_static, int4_weight, 8da4w"),
        ("quant.scheme=fp8_dynamic", "needs GPUs, but placement is cpu: int8_dynamic is its counterpart there"),
        ("quant.group_size=48", "quant.group_size must be 32, 64, 128 or 256, got 48"),
        ("quant.group_size=0", "quant.group_size must be 32, 64, 128 or 256, got 0"),
        ("quant.layers='mlp['", "quant.layers must be a regular expression, got 'mlp['"),
        ("quant.skip='*'", "quant.skip must be a regular expression, got '*': nothing to repeat"),
        ("quant.qat.enabled=true", "quant.qat.enabled=true needs a quant.scheme to train for, got none"),
        ("quant.qat.start_step=-1", "quant.qat.start_step must be 0 or more, got -1"),
        ("quant.bits=4", "no key 'quant.bits'"),
        ("calibration.every=-1", "calibration.every must be 0 (only at the start) or more steps, got -1"),
        ("calibration.samples=0", "calibration.samples must be at least 1, got 0"),
        ("calibration.batch_size=0", "calibration.batch_size must be at least 1, got 0"),
        ("calibration.iterations=-3", "calibration.iterations must be at least 1, got -3"),
        ("calibration.prompts=0", "calibration.prompts must be at least 1, got 0"),
        ("calibration.min_tokens=0", "calibration.min_tokens must be at least 1, got 0"),
        ("calibration.min_rows=0", "calibration.min_rows must be at least 1, got 0"),
        ("calibration.min_rows=300", "calibration.min_rows=300 is more than calibration.samples=256"),
        ("calibration.max_zero_point_shift=0", "calibration.max_zero_point_shift must be above 0, got 0"),
        ("calibration.outlier_std=-1", "calibration.outlier_std must be above 0, got -1"),
        ("calibration.max_outlier_growth=0", "calibration.max_outlier_growth must be above 0, got 0"),
        ("calibration.max_mean_error=0", "calibration.max_mean_error must be above 0, got 0"),
        ("calibration.max_kl=nan", "calibration.max_kl must be a finite number, got nan"),
        ("calibration.max_kl=0", "calibration.max_kl must be above 0, got 0"),
        ("rollback.max_accuracy_drop=1.5", "rollback.max_accuracy_drop is a share between 0 and 1, got 1.5"),
        ("rollback.max_accuracy_drop=-0.1", "rollback.max_accuracy_drop is a share between 0 and 1, got -0.1"),
        ("rollback.patience=0", "rollback.patience must be at least 1 rejection, got 0"),
        ("rollback.qat_fraction=0", "rollback.qat_fraction is a share in (0, 1], got 0"),
        ("rollback.qat_fraction=2", "rollback.qat_fraction is a share in (0, 1], got 2"),
        ("rollback.qat_lr_scale=0", "rollback.qat_lr_scale must be in (0, 1], got 0"),
        ("rollback.qat_lr_scale=1.1", "rollback.qat_lr_scale must be in (0, 1], got 1.1"),
    ],
)
def test_a_refusal_states_rule_value_and_way_out(override: str, says: str | None) -> None:
    if says is None:  # a path is taken as it is; the folder is checked when the run starts
        assert load_config("grpo", [override]).model.path == "/no/such"
    else:
        assert says in refused(override)


@pytest.mark.parametrize(
    "override",
    [
        *(f"algo.correction={c}" for c in ("clip", "tis", "sequence_tis", "icepop", "sequence_mask")),
        *(f"quant.group_size={n}" for n in (32, 64, 128, 256)),
        *(f"quant.scheme={s}" for s in QUANT_SCHEMES if s != "fp8_dynamic"),
        "quant.skip=''",
        "calibration.every=0",
        "calibration.min_rows=256",
        "rollback.max_accuracy_drop=0",
        "rollback.qat_fraction=1",
        "rollback.qat_lr_scale=1",
    ],
)
def test_values_at_the_bounds_are_taken(override: str) -> None:
    load_config("grpo", [override])


def test_training_on_the_grid_needs_a_scheme() -> None:
    config = load_config("grpo", ["quant.scheme=int4_weight", "quant.qat.enabled=true", "quant.qat.start_step=5"])
    assert (config.quant.scheme, config.quant.qat.enabled, config.quant.qat.start_step) == ("int4_weight", True, 5)


def test_all_problems_are_listed_at_once() -> None:
    lines = refused("trainer.lerning_rate=1", "group_size=1", "seed=x", "trainer.ranks=0").splitlines()
    assert len(lines) == 4


def test_paths_of_ones_own_stand_for_model_and_data(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("{}")
    config = load_config("grpo", [f"model={tmp_path}", f"data={tmp_path / 'd.jsonl'}"])
    assert config.model.path == str(tmp_path)
    assert config.model.name == tmp_path.name
    assert config.data.path == str(tmp_path / "d.jsonl")
    assert config.data.task is None


def test_a_file_is_checked_like_the_command_line_which_wins(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "steps: 7\nmodel: tiny\ntrainer:\n  lr: 1e-6\nasync.max_age: 2\ndata:\n  task_args: {min_terms: 3}\n"
    )
    config = load_config("grpo", ["steps=9"], file=file)
    assert (config.steps, config.trainer.lr, config.async_.max_age) == (9, 1e-6, 2)
    assert config.model.name == "tiny"
    assert config.data.task_args == {"min_terms": 3}
    file.write_text("trainer:\n  lerning_rate: 1\n")
    assert "my.yaml: trainer.lerning_rate: no key" in refused(file=file)
    file.write_text("steps: [\n")
    assert "is not YAML" in refused(file=file)
    file.write_text("- 1\n")
    assert "must hold keys and values, found list" in refused(file=file)
    assert "nope.yaml: No such file" in refused(file=tmp_path / "nope.yaml")


def test_what_is_printed_is_read_back_the_same(tmp_path: Path) -> None:
    config = load_config("grpo", ["model=tiny", "async.max_age=3", "algo.kl=0.1", "data.template='Q: {question}'"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert "\nasync:\n" in file.read_text()
    # group choices are no part of it; their values are
    values = "\n".join(file.read_text().splitlines())
    file.write_text(values)
    assert load_config("grpo", file=file) == config


def test_text_is_text_and_nothing_in_it_is_looked_up(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("data:\n  system: 'cost: ${price}'\n")
    config = load_config("grpo", ["data.template='${x} {question}'", "data.task_args={words: '${nope}'}"], file=file)
    assert config.data.task_args == {"words": "${nope}"}
    assert config.data.system == "cost: ${price}"
    assert config.data.template == "${x} {question}"


def test_task_settings_are_free_keys() -> None:
    config = load_config("grpo", ["data.task_args.min_terms=3"])
    assert config.data.task_args["min_terms"] == 3


def test_every_key_is_listed_as_users_write_it() -> None:
    keys = [key for key, _ in flatten(GrpoConfig)]
    assert "async.max_age" in keys
    assert "trainer.lr" in keys
    assert len(keys) == len(set(keys))


def test_the_age_bound_is_derived() -> None:
    assert load_config("grpo", ["async.max_age=3", "async.window=0.3"]).age_bound == 4
