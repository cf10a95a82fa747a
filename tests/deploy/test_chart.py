"""The Helm chart, rendered by Helm's own library: every value has its effect, and the rendered documents are legal."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import quire.demo
from quire.engine import nodes
from quire.metrics.queries import DECLARED
from quire.server.auth import PUBLIC_PATHS
from tests.cli.reading import read

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "quire"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
OPEN = {"auth": {"disabled": True}}
NODES = {"nodes.count": 2, "nodes.keySecretName": "c"}
# Each value: another one, the other values that it needs, and the text that is rendered only then.
EFFECTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "image.repository": ("r/q", {}, 'image: "r/q:0.1.0"'),
    "image.tag": ("7", {}, 'image: "quire:7"'),
    "image.pullPolicy": ("Always", {}, "imagePullPolicy: Always"),
    "imagePullSecrets": ([{"name": "x"}], {}, "imagePullSecrets:"),
    "replicas": (3, {}, "replicas: 3"),
    "nodes.count": (2, {"nodes.keySecretName": "c"}, "kind: LeaderWorkerSet"),
    "nodes.keySecretName": ("s", NODES, "secretKeyRef: {name: s, key: cluster-key}"),
    "nodes.keySecretKey": ("k", NODES, "secretKeyRef: {name: c, key: k}"),
    "nodes.port": (7, NODES, "--master-port=7"),
    "model": ("org/m", {}, '- "org/m"'),
    "args": (["--max-num-seqs", "32"], {}, '- "--max-num-seqs"'),
    "env": ([{"name": "A", "value": "b"}], {}, "name: A"),
    "auth.secretName": ("s", {}, "secretKeyRef: {name: s, key: api-key}"),
    "auth.secretKey": ("k", {"auth.secretName": "s"}, "secretKeyRef: {name: s, key: k}"),
    "auth.disabled": (True, {"auth.secretName": "s"}, "--no-auth"),
    "metrics.public": (False, {"auth.secretName": "s", "podMonitor.enabled": True}, "authorization:"),
    "huggingFaceTokenSecret.name": ("h", {}, "secretKeyRef: {name: h, key: token}"),
    "huggingFaceTokenSecret.key": ("t", {"huggingFaceTokenSecret.name": "h"}, "secretKeyRef: {name: h, key: t}"),
    "models.existingClaim": ("c", {}, "claimName: c"),
    "models.size": ("7Gi", {}, "sizeLimit: 7Gi"),
    "models.storageClassName": ("fast", {}, "storageClassName: fast"),
    "loras.existingClaim": ("l", {}, "--lora-dir=/loras"),
    "resources": ({"limits": {"cpu": "2"}}, {}, 'cpu: "2"'),
    "service.type": ("NodePort", {}, "type: NodePort"),
    "service.port": (81, {}, "port: 81"),
    "startup.minutes": (3, {}, "failureThreshold: 36"),
    "shutdown.preStopSeconds": (9, {}, "sleep: {seconds: 9}"),
    "shutdown.drainSeconds": (99, {}, "--shutdown-timeout=99"),
    "autoscaling.kind": ("hpa", {}, "name: vllm_num_requests_waiting"),
    "autoscaling.minReplicas": (3, {"autoscaling.kind": "hpa"}, "minReplicas: 3"),
    "autoscaling.maxReplicas": (33, {"autoscaling.kind": "keda"}, "maxReplicaCount: 33"),
    "autoscaling.waitingRequests": (4, {"autoscaling.kind": "keda"}, 'threshold: "4"'),
    "autoscaling.prometheusAddress": ("http://x", {"autoscaling.kind": "keda"}, "serverAddress: http://x"),
    "podMonitor.enabled": (True, {}, "kind: PodMonitor"),
    "podMonitor.interval": ("1s", {"podMonitor.enabled": True}, "interval: 1s"),
    "podDisruptionBudget.enabled": (True, {}, "kind: PodDisruptionBudget"),
    "podDisruptionBudget.maxUnavailable": (2, {"podDisruptionBudget.enabled": True}, "maxUnavailable: 2"),
    "networkPolicy.enabled": (True, {}, "kind: NetworkPolicy"),
    "networkPolicy.from": ([{"podSelector": {}}], {"networkPolicy.enabled": True}, "from:"),
    "topologySpread": (False, {}, ""),
    "inferencePool.enabled": (True, {}, "kind: InferencePool"),
    "inferencePool.endpointPicker": ("e", {"inferencePool.enabled": True}, "endpointPickerRef: {name: e,"),
    "nodeSelector": ({"a": "b"}, {}, "nodeSelector:"),
    "tolerations": ([{"key": "gpu"}], {}, "tolerations:"),
    "affinity": ({"nodeAffinity": {}}, {}, "affinity:"),
    "podAnnotations": ({"a": "b"}, {}, "annotations:"),
}


def _leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        is_group = isinstance(value, dict) and value and name != "resources"
        found += _leaves(value, f"{prefix}{name}.") if is_group else [f"{prefix}{name}"]
    return found


def _with(changes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {} if "auth.secretName" in changes else {"auth": {"disabled": True}}
    for path, value in changes.items():
        *groups, name = path.split(".")
        group = values
        for each in groups:
            group = group.setdefault(each, {})
        group[name] = value
    return values


def test_every_value_is_documented_and_has_an_effect_and_a_type() -> None:
    leaves = _leaves(VALUES)
    assert set(leaves) == set(EFFECTS)
    readme = (CHART / "README.md").read_text()
    assert [name for name in leaves if f"`{name}`" not in readme] == []
    jsonschema.validate(VALUES, SCHEMA)
    for path, (value, needs, _) in EFFECTS.items():
        jsonschema.validate(_with({**needs, path: value}), SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"replica": 3}, SCHEMA)


def test_the_metrics_it_names_exist() -> None:
    texts = [
        path.read_text() for path in (*CHART.rglob("*"), *(CHART.parents[1] / "kubernetes").iterdir()) if path.is_file()
    ]
    names = {word for text in texts for word in re.findall(r"vllm:[a-z_]+", text)}
    assert names
    assert names <= set(DECLARED)


def _render(values: dict[str, Any]) -> str:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is in the extra `charts`")
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        rendered: dict[str, str] = chart.render(values, name="demo", namespace="prod")
    return "\n---\n".join(text for name, text in sorted(rendered.items()) if name.endswith(".yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EFFECTS)
def test_a_value_has_its_effect(path: str) -> None:
    value, needs, expected = EFFECTS[path]
    before, after = _render(_with(needs)), _render(_with({**needs, path: value}))
    assert before != after
    assert expected in after
    assert not expected or expected not in before


# Of the extension's config/crd/bases/inference.networking.k8s.io_inferencepools.yaml, version v1; no package has it.
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["number"],
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
}
INFERENCE_POOL = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "inference.networking.k8s.io/v1"},
        "kind": {"const": "InferencePool"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["endpointPickerRef", "selector", "targetPorts"],
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["matchLabels"],
                    "properties": {
                        "matchLabels": {
                            "type": "object",
                            "minProperties": 1,
                            "maxProperties": 64,
                            "additionalProperties": {"type": "string", "maxLength": 63},
                        }
                    },
                },
                "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
                "endpointPickerRef": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "port"],  # for a Service, which is the default kind
                    "properties": {
                        "group": {"type": "string", "maxLength": 253},
                        "kind": {"type": "string", "minLength": 1, "maxLength": 63},
                        "name": _NAME,
                        "port": _PORT,
                        "failureMode": {"enum": ["FailOpen", "FailClose"]},
                    },
                },
            },
        },
    },
}


# Of LeaderWorkerSet's config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml, version v1; no package has it.
_COUNT = {"type": "integer", "minimum": 0}
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": _COUNT,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {"type": "object"},
                "rolloutStrategy": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["type"],
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                name: {"type": ["integer", "string"]} for name in ("maxSurge", "maxUnavailable")
                            }
                            | {"partition": _COUNT},
                        },
                    },
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": {"type": "object"},  # pods, which `kubernetes_validate` knows
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}
_SCHEMAS = {"InferencePool": INFERENCE_POOL, "LeaderWorkerSet": LEADER_WORKER_SET}


def check_foreign(document: dict[str, Any]) -> None:
    """Raise for a document that its custom resource definition refuses, or that has fields that it does not know."""
    if (schema := _SCHEMAS.get(document["kind"])) is not None:
        jsonschema.validate(document, schema)
        return
    group = {"ScaledObject": "keda.v1alpha1", "PodMonitor": "prometheus_operator.v1"}[document["kind"]]
    models = pytest.importorskip(f"cloudcoil.models.{group}", reason="the models are in the extra `charts`")
    model = getattr(models, document["kind"]).model_validate(document)
    known = model.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert known == document, "fields that the definition does not know are dropped by the model"


@pytest.mark.slow
def test_what_is_not_legal_is_found() -> None:
    trigger = {"type": "prometheus", "metadata": {"query": "up"}}
    scaled = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "x"},
        "spec": {"scaleTargetRef": {"name": "x"}, "triggers": [trigger]},
    }
    check_foreign(scaled)
    with pytest.raises(ValueError, match="valid integer"):
        check_foreign(scaled | {"spec": {**scaled["spec"], "minReplicaCount": "many"}})
    with pytest.raises(AssertionError, match="does not know"):
        check_foreign(scaled | {"spec": {**scaled["spec"], "triggers": [trigger | {"treshold": "4"}]}})
    template = {"size": 2, "workerTemplate": {}}
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "x"},
        "spec": {"leaderWorkerTemplate": template},
    }
    check_foreign(group)
    for wrong in ({"size": 0}, {"restartPolicy": "Never"}, {"template": {}}):
        with pytest.raises(jsonschema.ValidationError):
            check_foreign(group | {"spec": {"leaderWorkerTemplate": template | wrong}})


@pytest.mark.slow
def test_what_is_rendered_is_legal() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is in the extra `charts`")
    changes = {path: value for path, (value, _, _) in EFFECTS.items() if path not in ("model", "env", "nodes.count")}
    several = changes | NODES | {"loras.existingClaim": ""}
    own = {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"}
    seen = set()
    for kind in ("none", "hpa", "keda"):
        kinds = {"autoscaling.kind": kind}
        for values in (OPEN, _with(changes | kinds), _with(several | kinds)):
            for document in yaml.safe_load_all(_render(values)):
                if document is not None:
                    seen.add(document["kind"])
                    if document["kind"] in own:
                        validator.validate(document, "1.32", strict=True)
                    else:
                        check_foreign(document)
                    for pod in _pods(document):
                        as_kind = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
                        validator.validate(as_kind | {"template": pod}, "1.32", strict=True)
    assert seen == own | {"ScaledObject", "PodMonitor", "InferencePool", "LeaderWorkerSet"}


def _pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of a group's first pod, and of the others."""
    if document["kind"] != "LeaderWorkerSet":
        return []
    group = document["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def _documents(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is rendered, by kind."""
    found = [document for document in yaml.safe_load_all(_render(values)) if document]
    return {document["kind"]: document for document in found}


@pytest.mark.slow
def test_the_machines_of_a_server_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a group's pods, with the variables that the group gives them."""
    monkeypatch.setenv("QUIRE_CLUSTER_KEY", "of the tests, long enough")
    more = {
        "args": ["--max-num-seqs", "32"],
        "networkPolicy.enabled": True,
        "networkPolicy.from": [{"podSelector": {}}],
    }
    found = _documents(_with(NODES | more))
    assert "Deployment" not in found
    given = {"LWS_LEADER_ADDRESS": "demo-0.demo.prod", "POD_IP": "10.0.0.1"}
    told, pods = [], _pods(found["LeaderWorkerSet"])
    for index, pod in enumerate(pods):
        (container,) = pod["spec"]["containers"]
        assert ("QUIRE_CLUSTER_KEY" in str(container["env"]), container["args"][0]) == (True, "serve")
        text = "\n".join(container["args"][1:])
        for name, value in (given | {"LWS_WORKER_INDEX": str(index)}).items():
            text = text.replace(f"$({name})", value)
        engine, _ = read(*text.split("\n"))
        assert (engine.node_rank, engine.nnodes, engine.headless) == (index, 2, index == 1)
        assert (engine.master_addr, engine.max_num_seqs) == (given["LWS_LEADER_ADDRESS" if index else "POD_IP"], 32)
        told.append(nodes.hello(engine, quire.demo.path("target")))
        assert ("startupProbe" in container, "ports" in container) == (index == 0, index == 0)
    assert nodes.misfit(*told) is None
    labels = [pod["metadata"]["labels"] for pod in pods]

    def is_selected(selector: dict[str, str]) -> list[bool]:
        return [selector.items() <= each.items() for each in labels]

    assert is_selected(found["Service"]["spec"]["selector"]) == [True, False]
    inside = found["NetworkPolicy"]["spec"]["ingress"][1]
    assert "ports" not in inside  # the links of ranks have ports that the system chooses
    assert is_selected(inside["from"][0]["podSelector"]["matchLabels"]) == [True, True]
    # Requests that still run need all machines.
    first, other = (pod["spec"] for pod in pods)
    wait = other["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert other["terminationGracePeriodSeconds"] == first["terminationGracePeriodSeconds"] > wait


@pytest.mark.slow
def test_the_server_takes_what_the_pod_starts() -> None:
    changes = {"loras.existingClaim": "l", "args": ["--max-num-seqs", "32"], "model": "org/m"}
    pod = _documents(_with(changes))["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] == "serve"
    engine, server = read(*container["args"][1:])
    assert (engine.model, engine.max_num_seqs, server.host, server.no_auth) == ("org/m", 32, "0.0.0.0", True)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in PUBLIC_PATHS
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > wait + server.shutdown_timeout + 2
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/tmp", "/models", "/loras"}
    assert container["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.slow
def test_without_a_key_nothing_is_rendered() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is in the extra `charts`")
    logging.getLogger("helm").setLevel(logging.CRITICAL)
    with pytest.raises(helm.HelmError, match=r"Set auth\.secretName"):
        _render({})
    for changes, words in (({}, r"Set nodes\.keySecretName"), (NODES | {"loras.existingClaim": "l"}, "no adapters")):
        with pytest.raises(helm.HelmError, match=words):
            _render(_with({"nodes.count": 2, **changes}))
