{{- define "quire.name" -}}
{{- printf "%s" .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- /* The pods that serve: not the other machines of a server. */ -}}
{{- define "quire.serving" -}}
{{ include "quire.selector" . }}
{{- if gt (int .Values.nodes.count) 1 }}
app.kubernetes.io/component: server
{{- end }}
{{- end -}}

{{- define "quire.scaled" -}}
{{- if gt (int .Values.nodes.count) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "quire.name" . }}
{{- end -}}
