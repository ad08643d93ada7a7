{{- define "torpor.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "torpor.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "torpor.labels" -}}
{{ include "torpor.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "torpor.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{- /*
`helm upgrade --reuse-values` brings the values of the chart that was installed, without those that were added since.
Each template begins with this. Only added values are here: one that a user has removed with null stays away.
*/ -}}
{{- define "torpor.added" -}}
{{- $key := dict "existingSecret" "" "key" "key" -}}
{{- $torpor := dict "onDisconnect" "abort" "gpuPreserveState" true -}}
{{- $labelled := dict "serviceMonitor" (dict "labels" dict) "prometheusRule" (dict "labels" dict) -}}
{{- $tables := merge (dict "keyFile" $key "torpor" $torpor) $labelled -}}
{{- $others := dict "imagePullSecrets" list "serviceAccountName" "" -}}
{{- $others = merge $others (dict "initContainers" list "extraVolumes" list "extraVolumeMounts" list) -}}
{{- range $name, $defaults := $tables -}}
{{- if not (hasKey $.Values $name) -}}{{- $_ := set $.Values $name dict -}}{{- end -}}
{{- range $key, $value := $defaults -}}
{{- if not (hasKey (get $.Values $name) $key) -}}{{- $_ := set (get $.Values $name) $key $value -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $value := $others -}}
{{- if not (hasKey $.Values $name) -}}{{- $_ := set $.Values $name $value -}}{{- end -}}
{{- end -}}
{{- end -}}
