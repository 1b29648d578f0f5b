{{- define "aviflow.labels" -}}
app.kubernetes.io/name: aviflow
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: aviflow
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "aviflow.selector" -}}
app.kubernetes.io/name: aviflow
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "aviflow.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "aviflow.scheme" -}}
{{ ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{- /* Whether there is an authority of its own: agents know the control plane by it, and people where TLS is spoken. */ -}}
{{- define "aviflow.authority" -}}
{{- if or (eq .Values.mode "schedule") .Values.tls.enabled }}yes{{ end }}
{{- end }}

{{- define "aviflow.claim" -}}
{{ .Values.storage.existingClaim | default "aviflow" }}
{{- end }}

{{- /* The ConfigMap with the certificates that vouch for the database, where there is one. */ -}}
{{- define "aviflow.storeCa" -}}
{{- if eq .Values.store.kind "postgres" }}{{ .Values.store.postgres.caConfigMap }}{{ end }}
{{- end }}

{{- /* The control plane as the API server calls it. */ -}}
{{- define "aviflow.user" -}}
system:serviceaccount:{{ .Release.Namespace }}:aviflow
{{- end }}

{{- /* What would go wrong later is refused now. */ -}}
{{- define "aviflow.check" -}}
{{- if not (has .Values.mode (list "schedule" "observe")) }}
{{- fail (printf "mode is `%s`; write schedule or observe" .Values.mode) }}
{{- end }}
{{- if not (has .Values.store.kind (list "sqlite" "postgres")) }}
{{- fail (printf "store.kind is `%s`; write sqlite or postgres" .Values.store.kind) }}
{{- end }}
{{- if not (has (int .Values.replicas) (list 1 2)) }}
{{- fail (printf "replicas is %v; write 1, or 2 with store.kind postgres" .Values.replicas) }}
{{- end }}
{{- if and (gt (int .Values.replicas) 1) (eq .Values.store.kind "sqlite") }}
{{- fail "two replicas cannot share an SQLite file; write store.kind: postgres, or replicas: 1" }}
{{- end }}
{{- if and .Values.tls.secret (not .Values.tls.enabled) }}
{{- fail "tls.secret is shown by a control plane that speaks TLS; write tls.enabled: true, or leave the secret out" }}
{{- end }}
{{- $shared := or .Values.storage.existingClaim (has "ReadWriteMany" .Values.storage.accessModes) }}
{{- if and (gt (int .Values.replicas) 1) (not $shared) }}
{{- fail "two replicas share the volume of logs and code snapshots; write storage.accessModes: [ReadWriteMany], or name a claim with that mode in storage.existingClaim" }}
{{- end }}
{{- end }}
