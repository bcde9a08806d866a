{{/* launcher.yaml: what the scheduler makes the pods of jobs from. docs/decisions/0017-kubernetes.md is the contract. */}}
{{- define "syncline.launcher" -}}
{{- $full := include "syncline.fullname" . -}}
{{- $jobs := .Values.jobs -}}
{{- $images := dict -}}
{{- range $role := list "rollout" "trainer" "sync" -}}
{{- $_ := set $images $role (include "syncline.image" (dict "root" $ "service" $role "image" (get $jobs.images $role))) -}}
{{- end -}}
{{- $colocated := $jobs.images.colocated -}}
{{- if or $colocated.repository $colocated.tag $colocated.digest -}}
{{- $_ := set $images "colocated" (include "syncline.image" (dict "root" . "service" "rollout" "image" $colocated)) -}}
{{- else -}}
{{- $_ := set $images "colocated" $images.rollout -}}
{{- end -}}
{{- $env := deepCopy $jobs.env -}}
{{- with include "syncline.otlp" . -}}
{{- $_ := set $env "OTEL_EXPORTER_OTLP_ENDPOINT" . -}}
{{- end -}}
{{- with include "syncline.tracesTo" . -}}
{{- $_ := set $env "SYNCLINE_TRACES" "none" -}}
{{- $_ := set $env "SYNCLINE_TRACES_TO" . -}}
{{- end -}}
{{- $secretEnv := deepCopy $jobs.secretEnv -}}
{{- range $name, $_ := $secretEnv -}}
{{- if hasKey $env $name -}}
{{- fail (printf "jobs.secretEnv.%s: it is in jobs.env, too; say it once" $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $role := $jobs.roles -}}
{{- if hasKey ($role.resources.limits | default dict) $role.gpuResource -}}
{{- fail (printf "jobs.roles.%s.resources.limits: %s is what gpuResource names; say how many under gpus" $name $role.gpuResource) -}}
{{- end -}}
{{- end -}}
{{- if .Values.gateway.traces.enabled -}}
{{- $_ := set $secretEnv "SYNCLINE_TRACES_KEY" (dict "secret" (include "syncline.tracesSecret" .) "key" "key") -}}
{{- end -}}
{{- $_ := set $secretEnv "SYNCLINE_REDIS_URL" (dict "secret" (include "syncline.redisSecret" .) "key" "url") -}}
{{- toYaml (dict
  "release" .Release.Name
  "namespace" .Release.Namespace
  "lease" (printf "%s-scheduler" $full)
  "owner" (printf "%s-launcher" $full)
  "serviceAccount" (printf "%s-job" $full)
  "images" $images
  "pullPolicy" .Values.image.pullPolicy
  "pullSecrets" .Values.image.pullSecrets
  "env" $env
  "secretEnv" $secretEnv
  "runs" (dict "claim" (include "syncline.runsClaim" .) "subPath" .Values.storage.runs.subPath)
  "models" (dict "claim" (include "syncline.modelsClaim" .) "subPath" .Values.storage.models.subPath)
  "cache" $jobs.cache
  "shm" $jobs.shm
  "grace" $jobs.grace
  "user" .Values.security.uid
  "priorityClass" $jobs.priorityClass
  "queue" $jobs.queue
  "claimTemplate" $jobs.claimTemplate
  "roles" $jobs.roles
) -}}
{{- end -}}
