"""Repositories of stock weights and tokenizers, wherever a verb takes a directory of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import HfApi, constants
from transformers import AutoTokenizer, BertConfig, BertModel

import zoo_core
from zoo_core import registry
from zoo_core.testing.hub import Hub


@pytest.fixture
def publish(default_hub: Hub):
    """Make a repository of a folder."""
    api = HfApi(endpoint=default_hub.endpoint, token=default_hub.tokens.write)

    def publish(folder: Path, repo: str) -> None:
        api.create_repo(repo)
        api.upload_folder(repo_id=repo, folder_path=folder)

    return publish


@pytest.fixture
def stock(publish, small_bert, letters, tmp_path) -> Path:
    """A BERT as transformers saves it with its tokenizer; zoo/stock, the latter also zoo/words."""
    torch.manual_seed(0)
    BertModel(BertConfig(**small_bert)).save_pretrained(tmp_path / "stock")
    for name in ("stock", "words"):
        letters.save_pretrained(tmp_path / name)
        publish(tmp_path / name, f"zoo/{name}")
    return tmp_path / "stock"


@pytest.fixture
def mine(stock, small_bert, tmp_path) -> str:
    """A checkpoint without a tokenizer, of other weights than the stock ones."""
    model = zoo_core.build("bert", "linformer", options={"rank": 4}, seed=1, **small_bert)
    zoo_core.save(model, tmp_path / "mine")
    return str(tmp_path / "mine")


@pytest.fixture
def texts(tmp_path) -> str:
    lines = [" ".join("abcdefghijkl"[(n * k) % 12] for k in range(3 + n % 7)) for n in range(30)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    return str(tmp_path / "texts.txt")


def go_offline(hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.log.clear()


def fetched(hub: Hub) -> str:
    return "\n".join(map(str, hub.log))


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return zoo_core.load(directory).state_dict()


class TestStockWeightsAsAnArchitecture:
    @pytest.mark.parametrize("place", ["zoo/stock", "zoo/stock@main", "directory"])
    def test_build_is_that_of_the_family_with_pretrained(self, zoo, stock, tmp_path, place):
        place = str(stock) if place == "directory" else place
        how = ("--attention", "linformer", "--option", "rank=4", "--seed", "0", "-o")
        run = zoo("build", place, *how, str(tmp_path / "short"))
        assert run.code == 0, run.err
        assert zoo("build", "bert", "--pretrained", place, *how, str(tmp_path / "long")).code == 0
        short, long = weights_of(tmp_path / "short"), weights_of(tmp_path / "long")
        assert short.keys() == long.keys()
        assert all(torch.equal(short[name], long[name]) for name in long)
        words = BertModel.from_pretrained(stock).embeddings.word_embeddings.weight
        assert torch.equal(short["embeddings.word_embeddings.weight"], words)
        for built in ("short", "long"):  # with the tokenizer, so that it can go on to calibrate
            ours, theirs = (AutoTokenizer.from_pretrained(x) for x in (tmp_path / built, stock))
            assert ours.get_vocab() == theirs.get_vocab()

    def test_why_asks_for_no_weights_and_plans_on_their_config(
        self, zoo, default_hub, stock, publish
    ):
        default_hub.log.clear()
        run = zoo("why", "zoo/stock", "linformer")
        assert (run.code, run.out.startswith("yes  linformer fits zoo/stock\n")) == (0, True)
        assert ".safetensors" not in fetched(default_hub)
        config = json.loads((stock / "config.json").read_text())
        (stock / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
        publish(stock, "zoo/decoder")
        run = zoo("why", "zoo/decoder", "linformer")
        assert (run.code, "linformer has no causal form" in run.out) == (1, True)

    def test_bench_says_what_was_measured(self, zoo, stock):
        run = zoo(
            *("bench", "--model", "zoo/stock", "--attention", "linear", "--length", "16"),
            *("--rounds", "2", "--seconds", "0.001", "--no-peers", "--json"),
        )
        assert run.code == 0, run.err
        lines = [json.loads(line) for line in run.out.splitlines()]
        rows = [line for line in lines if line["kind"] == "row"]
        assert {row["name"] for row in rows} == {"stock", "floor", "linear"}
        assert {row["model"] for row in rows} == {"zoo/stock"}

    def test_a_timm_model(self, zoo, publish, tmp_path):
        sizes = dict(registry.architecture("deit").adapter().tiny())
        model = timm.create_model("deit_tiny_patch16_224", **sizes)
        timm.models.save_for_hf(model, tmp_path / "deit", model_args=sizes, safe_serialization=True)
        publish(tmp_path / "deit", "zoo/deit")
        run = zoo("build", "zoo/deit", "--attention", "linear", "-o", str(tmp_path / "built"))
        assert run.code == 0, run.err
        assert "zoo-core/deit" in run.out
        found = weights_of(tmp_path / "built")
        assert all(torch.equal(found[name], own) for name, own in model.state_dict().items())

    def test_an_architecture_wins_over_a_directory_of_its_name(self, zoo, tmp_path, monkeypatch):
        (tmp_path / "bert").mkdir()
        monkeypatch.chdir(tmp_path)
        assert zoo("why", "bert", "softmax").code == 0

    def test_offline(self, zoo, default_hub, stock, tmp_path, monkeypatch):
        BertModel.from_pretrained("zoo/stock")  # stock tools may have filled the cache
        go_offline(default_hub, monkeypatch)
        run = zoo("build", "zoo/stock", "--attention", "linear", "-o", str(tmp_path / "built"))
        assert run.code == 0, run.err
        run = zoo("why", "zoo/words", "linear")
        assert (run.code, "zoo/words@main is not in the cache" in run.err) == (1, True), run.err
        assert not fetched(default_hub)

    def test_what_holds_no_stock_weights_says_why(self, zoo, default_hub, stock, mine, publish):
        publish(Path(mine), "zoo/mine")
        (stock / "config.json").write_text('{"model_type": "gpt2"}')
        for verb in (("build", "-o", "x"), ("why", "linear"), ("bench", "linear", "--model")):
            for name, message in (
                ("zoo/none", "no architecture 'zoo/none'. Loaded: albert, bert"),
                ("zoo/none", "zoo/none@main could not be looked up"),
                ("zoo/none", "has no such repository"),
                ("zoo-core/brt", "did you mean 'bert'"),
                ("brt", "did you mean 'bert'"),
                ("zoo/words", "no installed architecture takes zoo/words: no model_type is in a"),
                (str(stock), "its model_type is 'gpt2' (there are: albert, bert"),
            ):
                words = [*verb, name] if verb[0] == "bench" else [verb[0], name, *verb[1:]]
                run = zoo(*words)
                assert (run.code, message in run.err) == (1, True), (words, run.err)
        run = zoo("build", "zoo/mine", "-o", "x")
        assert (run.code, "zoo/mine holds a patched model; use zoo.load" in run.err) == (1, True)

    def test_two_sources_of_weights_are_misuse(self, zoo, stock):
        run = zoo("build", "zoo/stock", "--pretrained", "-o", "x")
        assert (run.code, "leave --pretrained out" in run.err) == (2, True)


class TestWhatBecomesOfDirectories:
    @pytest.fixture
    def trained(self, small_bert, letters, tmp_path) -> str:
        """A patched model as Trainer leaves it, with its tokenizer."""
        model = zoo_core.build("bert", "linformer", options={"rank": 4}, seed=1, **small_bert)
        for one in (model, letters):
            one.save_pretrained(tmp_path / "trained")
        return str(tmp_path / "trained")

    def test_a_stock_model_is_not_replaced_by_what_is_built_of_it(self, zoo, stock, tmp_path):
        before = (stock / "model.safetensors").read_bytes()
        build = ("build", str(stock), "--attention", "linear", "-o")
        run = zoo(*build, str(stock))
        assert (run.code, "would be lost" in " ".join(run.err.split())) == (2, True), run.err
        assert (stock / "model.safetensors").read_bytes() == before
        assert not (stock / "zoo.json").exists()

    def test_nor_by_calibrate_which_says_so_before_it_starts(self, zoo, stock, mine, texts):
        run = zoo("calibrate", mine, texts, "-o", str(stock), "--teacher", "zoo/none")
        assert (run.code, "would be lost" in " ".join(run.err.split())) == (2, True), run.err

    def test_nor_is_a_checkpoint(self, zoo, stock, tmp_path, monkeypatch):
        zoo_core.save(zoo_core.build("bert", pretrained=str(stock)), tmp_path / "saved")
        monkeypatch.chdir(tmp_path)
        for words in (("saved",), ("bert", "--pretrained", "saved")):
            run = zoo("build", *words, "--attention", "linear", "-o", str(tmp_path / "saved"))
            told = " ".join(run.err.split())
            assert (run.code, "is what the model is built from" in told) == (2, True), told

    def test_what_trainer_wrote_becomes_a_checkpoint(self, zoo, trained, tmp_path):
        for verb in ("verify", "push"):
            run = zoo(verb, trained, *(["zoo/x", "--dry-run"] if verb == "push" else []))
            told = "".join((run.out + run.err).split())
            assert (run.code, f"`zoobuild{trained}-oANOTHER`" in told) == (1, True), run
        target = str(tmp_path / "saved")
        run = zoo("build", trained, "-o", target)
        assert run.code == 0, run.err
        assert zoo("verify", target).code == 0
        assert AutoTokenizer.from_pretrained(target).vocab_size == 14
        ours, theirs = weights_of(tmp_path / "saved"), weights_of(Path(trained))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def test_a_patched_model_takes_no_other_attention(self, zoo, trained, tmp_path):
        run = zoo("build", trained, "--attention", "linear", "-o", str(tmp_path / "x"))
        told = " ".join(run.err.split())
        assert (run.code, "leave --attention out" in told) == (2, True), told
        run = zoo("build", "bert", "--pretrained", trained, "-o", str(tmp_path / "x"))
        assert (run.code, f"(`zoo build {trained} -o ANOTHER`)" in run.err) == (1, True), run.err

    def test_a_path_that_leads_nowhere_is_told(self, zoo, tmp_path):
        (tmp_path / "vit.pth").touch()
        for name, message in (
            ("./nowhere", "./nowhere is no directory; no architecture"),
            (str(tmp_path / "vit.pth"), "vit.pth is a file, not a directory; no architecture"),
        ):
            run = zoo("build", name, "-o", "x")
            assert (run.code, message in run.err) == (1, True), run.err

    def test_a_timm_family_names_the_family_that_takes_it(self, zoo, stock):
        run = zoo("build", "vit", "--pretrained", str(stock), "-o", "x")
        assert (run.code, "transformers checkpoint (bert), try bert" in run.err) == (1, True)


class TestTeacherAndTokenizer:
    def scores(self, zoo, *how: str) -> dict:
        run = zoo("evaluate", *how, "--limit", "12", "--json")
        assert run.code == 0, run.err
        return json.loads(run.out)["scores"]

    def test_a_repository_means_what_its_directory_does(self, zoo, stock, mine, texts, publish):
        here = self.scores(zoo, mine, texts, "--teacher", str(stock), "--tokenizer", str(stock))
        how = ("--teacher", "zoo/stock@main", "--tokenizer", "zoo/words")
        assert self.scores(zoo, mine, texts, *how) == here
        publish(Path(mine), "zoo/mine")
        how = ("--teacher", "zoo/mine", "--tokenizer", "zoo/stock")  # a checkpoint is one, too
        by_itself = self.scores(zoo, mine, texts, *how)
        assert by_itself == self.scores(zoo, mine, texts, "--tokenizer", str(stock)) != here

    def test_calibrate_keeps_the_tokenizer(self, zoo, stock, mine, texts, tmp_path):
        run = zoo(
            *("calibrate", mine, texts, "-o", str(tmp_path / "healed"), "--steps", "1"),
            *("--batch-size", "4", "--teacher", "zoo/stock", "--tokenizer", "zoo/words"),
        )
        assert run.code == 0, run.err
        assert AutoTokenizer.from_pretrained(tmp_path / "healed").vocab_size == 14

    def test_the_other_verbs(self, zoo, stock, mine, texts, tmp_path):
        how = ("--data", texts, "--tokenizer", "zoo/words", "--limit", "4", "--json")
        run = zoo("diagnose", mine, *how, "--part", "attention")
        assert run.code == 0, run.err
        how += ("--teacher", "zoo/stock", "--part", "retention", "-o", str(tmp_path / "page.html"))
        run = zoo("report", mine, *how)
        assert run.code == 0, run.err
        assert json.loads(run.out)["missing"].keys() == {"speed", "maps", "diagnosis"}

    @pytest.mark.parametrize("brought_by", ["zoo", "transformers"])
    def test_offline(self, zoo, default_hub, mine, texts, brought_by, monkeypatch):
        how = (mine, texts, "--teacher", "zoo/stock", "--tokenizer", "zoo/words")
        if brought_by == "zoo":
            online = self.scores(zoo, *how)
        else:
            BertModel.from_pretrained("zoo/stock")
            AutoTokenizer.from_pretrained("zoo/words")
        go_offline(default_hub, monkeypatch)
        offline = self.scores(zoo, *how)
        assert brought_by == "transformers" or offline == online
        run = zoo("evaluate", mine, texts, "--tokenizer", "zoo/none")
        assert (run.code, "zoo/none@main is not in the cache" in run.err) == (1, True), run.err
        assert not fetched(default_hub)

    @pytest.mark.parametrize("option", ["--teacher", "--tokenizer"])
    def test_what_is_nowhere(self, zoo, default_hub, mine, texts, option):
        how = ("evaluate", mine, texts, "--tokenizer", str(Path(texts).parent / "words"), option)
        for name, code, message in (
            ("zoo/none", 1, "zoo/none@main could not be looked up"),
            ("zoo/none", 1, "(nor is there a directory 'zoo/none')"),
            ("none", 2, "there is no directory 'none'; one on the Hub is written owner/name"),
            (texts, 2, "is a file, not a directory"),
        ):
            run = zoo(*how, name)
            assert (run.code, message in " ".join(run.err.split())) == (code, True), run.err

    def test_a_place_without_a_tokenizer(self, zoo, mine, texts, publish):
        publish(Path(mine), "zoo/mine")
        run = zoo("evaluate", mine, texts, "--tokenizer", "zoo/mine")
        assert (run.code, "zoo/mine holds neither a tokenizer nor" in run.err) == (1, True), run.err

    @pytest.mark.parametrize("place", ["zoo/evil", "directory"])
    @pytest.mark.parametrize("option", ["--teacher", "--tokenizer"])
    def test_code_and_pickles_are_left_alone(
        self, zoo, default_hub, stock, mine, texts, publish, option, place, monkeypatch
    ):
        """Nobody is asked whether to run it, either, as transformers would on a terminal."""
        monkeypatch.setattr("builtins.input", lambda text: "y")
        evil = stock.with_name("evil")
        evil.mkdir()
        (evil / "evil.py").write_text("raise SystemExit('it ran')")
        codes = {"AutoTokenizer": ["evil.Evil", None], "AutoModel": "evil.Evil"}
        told = {"auto_map": codes, "tokenizer_class": "Evil"}
        (evil / "tokenizer_config.json").write_text(json.dumps(told))
        if option == "--teacher":
            config = json.loads((stock / "config.json").read_text())
            (evil / "config.json").write_text(json.dumps({**config, **told}))
            (stock / "model.safetensors").rename(evil / "pytorch_model.bin")
        publish(evil, "zoo/evil")
        default_hub.log.clear()
        where = str(evil) if place == "directory" else place
        run = zoo("evaluate", mine, texts, "--tokenizer", "zoo/words", option, where)
        assert run.code == 1, run
        assert "evil" in run.err
        assert "evil.py" not in fetched(default_hub)
        assert not default_hub.log.find("*pytorch_model.bin", method="GET")


def test_a_model_of_a_revision_finds_its_tokenizer(default_hub: Hub, stock: Path) -> None:
    model = zoo_core.build("bert", "linear", pretrained="zoo/stock@main", seed=0)
    texts = ["a b c", "d e f g"] * 10
    assert zoo_core.calibrate(model, texts, steps=1, batch_size=4).as_dict()["steps"] == 1
