{{- /*
The template of a pod. component: "server", or "node" for a machine that computes stages for a server.
*/ -}}
{{- define "quire.pod" -}}
{{- $is_server := eq .component "server" }}
{{- $component := .component }}
{{- with .root }}
{{- $has_nodes := gt (int .Values.nodes.count) 1 }}
{{- if and (not .Values.auth.secretName) (not .Values.auth.disabled) }}
{{- fail "Set auth.secretName to a secret with the API key, or auth.disabled to true: the server is open to the cluster then." }}
{{- end }}
{{- if and $has_nodes (not .Values.nodes.keySecretName) }}
{{- fail "Set nodes.keySecretName to a secret with the key that the machines of a server share." }}
{{- end }}
{{- if and $has_nodes .Values.loras.existingClaim }}
{{- fail "Leave loras.existingClaim out: a model on several machines has no adapters in this version." }}
{{- end }}
metadata:
  labels:
    {{- include "quire.labels" . | nindent 4 }}
    {{- if $has_nodes }}
    app.kubernetes.io/component: {{ $component }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  # Time for the proxies to forget this server, for running requests to end, and for a last word to each stream.
  terminationGracePeriodSeconds: {{ add .Values.shutdown.preStopSeconds .Values.shutdown.drainSeconds 10 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    seccompProfile: {type: RuntimeDefault}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if .Values.topologySpread }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "quire.selector" . | nindent 10 }}
  {{- end }}
  containers:
    - name: quire
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        {{- with .Values.model }}
        - {{ . | quote }}
        {{- end }}
        - --log-format=json
        {{- if $has_nodes }}
        - --pipeline-parallel-size={{ .Values.nodes.count }}
        - --nnodes={{ .Values.nodes.count }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$({{ if $is_server }}POD_IP{{ else }}LWS_LEADER_ADDRESS{{ end }})
        - --master-port={{ .Values.nodes.port }}
        {{- end }}
        {{- if $is_server }}
        - --host=0.0.0.0
        - --port=8000
        {{- if .Values.metrics.public }}
        - --prometheus-public
        {{- end }}
        - --shutdown-timeout={{ .Values.shutdown.drainSeconds }}
        {{- if .Values.auth.disabled }}
        - --no-auth
        {{- end }}
        {{- else }}
        - --headless
        {{- end }}
        {{- if .Values.loras.existingClaim }}
        - --enable-lora
        - --lora-dir=/loras
        {{- end }}
        {{- range .Values.args }}
        - {{ . | quote }}
        {{- end }}
      env:
        - {name: HF_HOME, value: /models}
        - {name: QUIRE_CACHE_DIR, value: /models/quire}
        {{- if $has_nodes }}
        - {name: VLLM_ENGINE_READY_TIMEOUT_S, value: {{ mul .Values.startup.minutes 60 | quote }}}
        - name: QUIRE_CLUSTER_KEY
          valueFrom:
            secretKeyRef: {name: {{ .Values.nodes.keySecretName }}, key: {{ .Values.nodes.keySecretKey }}}
        {{- end }}
        {{- if and $has_nodes $is_server }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- if and .Values.auth.secretName $is_server }}
        - name: VLLM_API_KEY
          valueFrom:
            secretKeyRef: {name: {{ .Values.auth.secretName }}, key: {{ .Values.auth.secretKey }}}
        {{- end }}
        {{- if .Values.huggingFaceTokenSecret.name }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .Values.huggingFaceTokenSecret.name }}, key: {{ .Values.huggingFaceTokenSecret.key }}}
        {{- end }}
        {{- if .Values.loras.existingClaim }}
        - {name: VLLM_ALLOW_RUNTIME_LORA_UPDATING, value: "1"}
        {{- end }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $is_server }}
      ports:
        - {name: http, containerPort: 8000}
      startupProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        failureThreshold: {{ mul .Values.startup.minutes 12 }}
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
      # The server replaces an engine that fails or is stuck by itself; only the API process has to live.
      livenessProbe:
        httpGet: {path: /livez, port: http}
        periodSeconds: 10
      lifecycle:
        preStop:
          sleep: {seconds: {{ .Values.shutdown.preStopSeconds }}}
      {{- else }}
      # A machine without a server has no port. It ends with the server or with a rank of its own, and is started again.
      lifecycle:
        preStop: # requests still run
          sleep: {seconds: {{ add .Values.shutdown.preStopSeconds .Values.shutdown.drainSeconds }}}
      {{- end }}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: models, mountPath: /models}
        {{- if .Values.loras.existingClaim }}
        - {name: loras, mountPath: /loras, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: models
      {{- if .Values.models.existingClaim }}
      persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}}
      {{- else if .Values.models.storageClassName }}
      ephemeral:
        volumeClaimTemplate:
          spec:
            accessModes: [ReadWriteOnce]
            storageClassName: {{ .Values.models.storageClassName }}
            resources: {requests: {storage: {{ .Values.models.size }}}}
      {{- else }}
      emptyDir: {sizeLimit: {{ .Values.models.size }}}
      {{- end }}
    {{- if .Values.loras.existingClaim }}
    - name: loras
      persistentVolumeClaim: {claimName: {{ .Values.loras.existingClaim }}, readOnly: true}
    {{- end }}
{{- end }}
{{- end -}}
