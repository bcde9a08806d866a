{{/* Names. A full name has at most 38 characters, so that whatever is made from it stays within 63. */}}
{{- define "syncline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 38 | trimSuffix "-" -}}
{{- end -}}

{{- define "syncline.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride -}}
{{- if gt (len $full) 38 -}}
{{- printf "%s-%s" ($full | trunc 31 | trimSuffix "-") (sha256sum $full | trunc 6) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{/* dict root component -> labels */}}
{{- define "syncline.selector" -}}
app.kubernetes.io/name: {{ include "syncline.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "syncline.labels" -}}
{{ include "syncline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: syncline
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* dict root service image -> the image of one of syncline's own services */}}
{{- define "syncline.image" -}}
{{- $repository := default (printf "%s/%s" .root.Values.image.registry .service) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* a foreign image: repository, tag, digest */}}
{{- define "syncline.foreignImage" -}}
{{- if .digest -}}{{ printf "%s@%s" .repository .digest }}{{- else -}}{{ printf "%s:%s" .repository .tag }}{{- end -}}
{{- end -}}

{{- define "syncline.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "syncline.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.security.uid }}
runAsGroup: {{ .Values.security.uid }}
fsGroup: {{ .Values.security.uid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "syncline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Secrets */}}
{{- define "syncline.tokenSecret" -}}
{{- default (printf "%s-token" (include "syncline.fullname" .)) .Values.gateway.token.existingSecret -}}
{{- end -}}

{{/* what Prometheus shows: a token that reads /metrics and nothing else */}}
{{- define "syncline.metricsSecret" -}}
{{- default (printf "%s-metrics" (include "syncline.fullname" .)) .Values.gateway.metrics.existingSecret -}}
{{- end -}}

{{/* What the gateway speaks: also the name of its Service's port. */}}
{{- define "syncline.scheme" -}}
{{- ternary "https" "http" (ne .Values.gateway.tls.secretName "") -}}
{{- end -}}

{{/* a size such as 1.5Gi, 500M or 6gb (redis' own way) -> whole bytes */}}
{{- define "syncline.bytes" -}}
{{- $units := dict "M" 1000000.0 "G" 1000000000.0 "T" 1000000000000.0 "P" 1000000000000000.0
  "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0
  "kb" 1024.0 "mb" 1048576.0 "gb" 1073741824.0 -}}
{{- printf "%d" (int64 (mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[A-Za-z]+$" .)))) -}}
{{- end -}}

{{/* What Redis may keep. It must refuse to write before the kernel kills it, and rewriting its file takes room, too. */}}
{{- define "syncline.maxmemory" -}}
{{- $limit := get (.Values.redis.resources.limits | default dict) "memory" | default "" -}}
{{- $said := .Values.redis.maxmemory -}}
{{- if and $said $limit (gt (include "syncline.bytes" $said | int64) (include "syncline.bytes" $limit | int64)) -}}
{{- fail (printf "redis.maxmemory: %s is more than redis.resources.limits.memory, %s: the server would be killed, not refuse" $said $limit) -}}
{{- end -}}
{{- if $said -}}
{{- $said -}}
{{- else if $limit -}}
{{- div (mul (include "syncline.bytes" $limit | int64) 3) 4 -}}
{{- else -}}
{{- fail "redis.resources.limits.memory: without it the server has no bound; give it, or say redis.maxmemory" -}}
{{- end -}}
{{- end -}}

{{- define "syncline.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{- default (printf "%s-redis" (include "syncline.fullname" .)) .Values.redis.auth.existingSecret -}}
{{- else -}}
{{- required "redis.external.existingSecret: redis.enabled is false, so name a Secret whose key `url` says where Redis is" .Values.redis.external.existingSecret -}}
{{- end -}}
{{- end -}}

{{- define "syncline.runsClaim" -}}
{{- default (printf "%s-runs" (include "syncline.fullname" .)) .Values.storage.runs.existingClaim -}}
{{- end -}}

{{/* the scheduler's; pods of jobs have one without rights */}}
{{- define "syncline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (printf "%s-scheduler" (include "syncline.fullname" .)) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: serviceAccount.create is false, so name the one that the scheduler shall use" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Where spans go: the release's own collector, an address, or nowhere. */}}
{{- define "syncline.otlp" -}}
{{- if .Values.otel.collector.enabled -}}
{{- printf "http://%s-otel:4318" (include "syncline.fullname" .) -}}
{{- else -}}
{{- .Values.otel.endpoint -}}
{{- end -}}
{{- end -}}

{{- define "syncline.modelsClaim" -}}
{{- default (printf "%s-models" (include "syncline.fullname" .)) .Values.storage.models.existingClaim -}}
{{- end -}}

{{/* Environment of the release's own processes. Pods of jobs get theirs from the launcher (docs/decisions/0017). */}}
{{- define "syncline.environment" -}}
- name: SYNCLINE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "syncline.redisSecret" . }}
      key: url
- name: SYNCLINE_RUNS
  value: /runs
- name: SYNCLINE_MODELS
  value: /models
- name: SYNCLINE_CACHE
  value: /cache
- name: SYNCLINE_HEALTH_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: SYNCLINE_HEALTH_PORT
  value: "8081"
{{- with include "syncline.otlp" . }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Spans go to the gateway, which keeps them on a volume of its own: SQLite must not lie on a shared one. */}}
{{- define "syncline.tracesSecret" -}}
{{- default (printf "%s-traces" (include "syncline.fullname" .)) .Values.gateway.traces.existingSecret -}}
{{- end -}}

{{- define "syncline.tracesTo" -}}
{{- if .Values.gateway.traces.enabled -}}
{{- printf "http://%s-traces:4318" (include "syncline.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "syncline.tracesKey" -}}
- name: SYNCLINE_TRACES_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "syncline.tracesSecret" . }}
      key: key
{{- end -}}

{{/* of scheduler and errands */}}
{{- define "syncline.tracesSent" -}}
{{- if .Values.gateway.traces.enabled -}}
- name: SYNCLINE_TRACES
  value: none
- name: SYNCLINE_TRACES_TO
  value: {{ include "syncline.tracesTo" . | quote }}
{{ include "syncline.tracesKey" . }}
{{- else -}}
- name: SYNCLINE_TRACES
  value: /cache/traces.sqlite
{{- end -}}
{{- end -}}

{{- define "syncline.tracesKept" -}}
{{- with .Values.gateway.traces -}}
- name: SYNCLINE_TRACES
  value: {{ ternary "/traces" "/cache" (and .enabled .storage.enabled) }}/traces.sqlite
- name: SYNCLINE_TRACES_DAYS
  value: {{ .days | int64 | quote }}
- name: SYNCLINE_TRACES_MIB
  value: {{ .mib | int64 | quote }}
{{- if .enabled }}
- name: SYNCLINE_TRACES_PORT
  value: "4318"
{{ include "syncline.tracesKey" $ }}
{{- end }}
{{- end -}}
{{- end -}}

{{- define "syncline.mounts" -}}
- name: runs
  mountPath: /runs
  {{- with .Values.storage.runs.subPath }}
  subPath: {{ . }}
  {{- end }}
- name: models
  mountPath: /models
  {{- with .Values.storage.models.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "syncline.volumes" -}}
- name: runs
  persistentVolumeClaim:
    claimName: {{ include "syncline.runsClaim" . }}
- name: models
  persistentVolumeClaim:
    claimName: {{ include "syncline.modelsClaim" . }}
- name: cache
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- end -}}

{{- define "syncline.healthPort" -}}
ports:
  - name: health
    containerPort: 8081
    protocol: TCP
{{- end -}}

{{/* seconds that a start may take -> probes of the health server */}}
{{- define "syncline.healthProbes" -}}
startupProbe:
  httpGet: {path: /started, port: health}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health, port: health}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: health}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 2
{{- end -}}

{{/* a part of the values with nodeSelector, tolerations and priorityClassName */}}
{{- define "syncline.placing" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* auto | true | false, against what the cluster has: "true" or "" */}}
{{- define "syncline.wanted" -}}
{{- if eq (toString .enabled) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has .kind -}}true{{- end -}}
{{- else if eq (toString .enabled) "true" -}}true{{- end -}}
{{- end -}}

{{/* Pods that the scheduler makes. */}}
{{- define "syncline.jobPods" -}}
app.kubernetes.io/name: syncline
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: syncline-scheduler
{{- end -}}

{{/* NetworkPolicy parts */}}
{{- define "syncline.ours" -}}
- podSelector:
    matchLabels:
      app.kubernetes.io/name: {{ include "syncline.name" . }}
      app.kubernetes.io/instance: {{ .Release.Name }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [gateway, scheduler, errands]}
- podSelector:
    matchLabels:
      {{- include "syncline.jobPods" . | nindent 6 }}
{{- end -}}

{{- define "syncline.toRedis" -}}
{{- if .Values.redis.enabled -}}
- ports: [{port: 6379, protocol: TCP}]
  to:
    - podSelector:
        matchLabels:
          {{- include "syncline.selector" (dict "root" . "component" "redis") | nindent 10 }}
{{- else -}}
- ports: [{port: {{ .Values.redis.external.port }}, protocol: TCP}]
{{- end -}}
{{- end -}}

{{- define "syncline.toTraces" -}}
{{- if .Values.gateway.traces.enabled -}}
- ports: [{port: 4318, protocol: TCP}]
  to:
    - podSelector:
        matchLabels:
          {{- include "syncline.selector" (dict "root" . "component" "gateway") | nindent 10 }}
{{- end -}}
{{- end -}}

{{- define "syncline.toCollector" -}}
{{- if .Values.otel.collector.enabled -}}
- ports: [{port: 4318, protocol: TCP}]
  to:
    - podSelector:
        matchLabels:
          {{- include "syncline.selector" (dict "root" . "component" "otel") | nindent 10 }}
{{- else if .Values.otel.endpoint -}}
{{- $url := urlParse .Values.otel.endpoint -}}
{{- $said := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
- ports: [{port: {{ default (ternary "443" "80" (eq $url.scheme "https")) $said }}, protocol: TCP}]
{{- end -}}
{{- end -}}
