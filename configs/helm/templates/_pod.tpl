{{/* What the pods of all kinds share. Arguments: root (the chart's own), and with "pod": a pool or the one pod. */}}

{{- define "splitscribe.labels" -}}
app.kubernetes.io/name: splitscribe
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "splitscribe.settings" -}}
{{- with .Values.models }}
models:
  {{- toYaml . | nindent 2 }}
{{- else }}
model: {{ .Values.model }}
{{- end }}
placement: {{ if .Values.kuberay }}split{{ else }}{{ .Values.placement }}{{ end }}
{{- /* A network joins the pods' GPUs, and states are a 64th of the bytes of large-v3's KV. */}}
{{- if and .Values.kuberay (eq (default "" .Values.decoder.settings.device) "cuda") (not .Values.settings.handoff) }}
handoff: encoder_states
{{- end }}
{{- with .Values.settings }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "splitscribe.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "splitscribe.env" -}}
- {name: HF_HOME, value: /models}
- {name: TRITON_HOME, value: /home/ray/.cache}
{{- if .Values.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.existingSecret }}, key: hf-token, optional: true}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "splitscribe.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: cache, mountPath: /home/ray/.cache}
- {name: models, mountPath: /models}
{{- if or .Values.existingSecret (not .Values.kuberay) }}
- {name: config, mountPath: /etc/splitscribe, readOnly: true}
{{- end }}
{{- if and .Values.batches.existingClaim (not .Values.kuberay) }}
- {name: batches, mountPath: /var/lib/splitscribe}
{{- end }}
{{- end }}

{{- define "splitscribe.pod" -}}
{{- $values := .root.Values -}}
enableServiceLinks: false # variables of every Service in the namespace, which nothing here reads
securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
{{- with $values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
initContainers:
  - name: kernels # of the image, into the volume that will have those of other processors
    image: {{ $values.image.repository }}:{{ $values.image.tag }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: [cp, -r, /home/ray/.cache/., /cache]
    securityContext:
      {{- include "splitscribe.security" .root | nindent 6 }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
  {{- if $values.modelCache.pull }}
  - name: pull
    image: {{ $values.image.repository }}:{{ $values.image.tag }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command:
      - splitscribe
      - pull
      {{- range $values.models }}
      - {{ .model }}
      {{- else }}
      - {{ $values.model }}
      {{- end }}
    securityContext:
      {{- include "splitscribe.security" .root | nindent 6 }}
    env:
      {{- include "splitscribe.env" .root | nindent 6 }}
    volumeMounts:
      {{- include "splitscribe.mounts" .root | nindent 6 }}
  {{- end }}
volumes:
  - name: tmp # Ray's folder, and uploads while they arrive
    emptyDir: {}
  - name: shm # Ray's objects, and what UCX shares between processes
    emptyDir: {medium: Memory, sizeLimit: {{ .pod.shm }}}
  - name: cache # kernels
    emptyDir: {}
  - name: models
    {{- if $values.modelCache.existingClaim }}
    persistentVolumeClaim: {claimName: {{ $values.modelCache.existingClaim }}}
    {{- else }}
    emptyDir: {sizeLimit: {{ $values.modelCache.sizeLimit }}}
    {{- end }}
  {{- if or $values.existingSecret (not $values.kuberay) }}
  - name: config
    projected:
      sources:
        {{- if $values.existingSecret }}
        - secret: {name: {{ $values.existingSecret }}, items: [{key: api-keys, path: api-keys}]}
        {{- end }}
        {{- if not $values.kuberay }}
        - configMap: {name: {{ .root.Release.Name }}}
        {{- end }}
  {{- end }}
  {{- if and $values.batches.existingClaim (not $values.kuberay) }}
  - name: batches
    persistentVolumeClaim: {claimName: {{ $values.batches.existingClaim }}}
  {{- end }}
{{- end }}
