package webhook

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"unicode/utf8"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/clip"
)

// The outcomes of questions, beside the outcomes of package inject.
const (
	outcomeIgnored = "ignored" // the question is not about the creation of a pod
	outcomeInvalid = "invalid" // the request has no question, or no valid pod
	outcomeBusy    = "busy"
)

// maxName is the longest name or UID of an object; a pod's name has at most 253 characters.
const maxName = 253

// maxReason is the longest reason in an answer, in bytes. A reason may quote what is in the pod.
const maxReason = 4 << 10

// An answer is the response to a request.
type answer struct {
	status  int
	outcome string
	text    []byte // an AdmissionReview in JSON, or an error
}

// invalid returns the answer to a request that is no question.
func invalid(status int, text string) answer {
	return answer{status, outcomeInvalid, []byte(clip.Text(text, maxReason))}
}

// refusal returns an answer that makes the API server reject the pod.
func refusal(code int32, reason metav1.StatusReason, message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: "nametap cannot be added to this pod: " + clip.Text(message, maxReason),
	}}
}

// A reviewer answers questions.
type reviewer struct {
	log      *slog.Logger
	settings *settings
	read     func(ctx context.Context, namespace string) (labels, annotations map[string]string, err error) // Config.Namespace, which may be nil
	proxy    func() map[string]string                                                                       // Config.ProxyMetadata, which may be nil
}

// review answers a question about a pod. labelled is true if the pod's namespace has the label Enabled.
func (r reviewer) review(ctx context.Context, labelled bool, body []byte) answer {
	if !utf8.Valid(body) { // decoding would make it three times as long
		return invalid(http.StatusBadRequest, "want an AdmissionReview in JSON, in UTF-8")
	}
	var q admissionv1.AdmissionReview
	if err := json.Unmarshal(body, &q); err != nil {
		return invalid(http.StatusBadRequest, fmt.Sprintf("want an AdmissionReview in JSON: %v", err))
	}
	want := admissionv1.SchemeGroupVersion.String()
	if q.APIVersion != want || q.Kind != "AdmissionReview" || q.Request == nil || q.Request.UID == "" {
		return invalid(http.StatusBadRequest, fmt.Sprintf("want an AdmissionReview of %s with a request, got kind %.100q of %.100q (admissionReviewVersions)", want, q.Kind, q.APIVersion))
	}
	for field, text := range map[string]string{
		"uid": string(q.Request.UID), "namespace": q.Request.Namespace, "name": q.Request.Name,
		"operation": string(q.Request.Operation), "resource": q.Request.Resource.Resource,
	} {
		if len(text) > maxName {
			return invalid(http.StatusBadRequest, fmt.Sprintf("%s %.100q...: want at most %d characters", field, text, maxName))
		}
	}
	response, outcome := r.decide(ctx, labelled, q.Request)
	response.UID = q.Request.UID
	text, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: q.TypeMeta, Response: response})
	if err != nil {
		return invalid(http.StatusInternalServerError, fmt.Sprintf("writing the answer: %v", err))
	}
	return answer{http.StatusOK, outcome, text}
}

// maxPatch is the longest patch, in bytes. etcd would not store a pod with a longer patch.
const maxPatch = 3 << 20

// decide returns the answer to a question, without the UID, and the outcome.
func (r reviewer) decide(ctx context.Context, labelled bool, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	if request.Resource != (metav1.GroupVersionResource{Version: "v1", Resource: "pods"}) || request.SubResource != "" || request.Operation != admissionv1.Create {
		return &admissionv1.AdmissionResponse{
			Allowed:  true,
			Warnings: []string{fmt.Sprintf("nametap changes pods that are created only, not %s of %s: correct the rules of its MutatingWebhookConfiguration", request.Operation, request.Resource.Resource)},
		}, outcomeIgnored
	}
	namespace, err := r.namespace(ctx, request.Namespace, labelled)
	if err != nil {
		return refusal(http.StatusInternalServerError, metav1.StatusReasonInternalError, fmt.Sprintf("reading its namespace: %v", err)), string(inject.Refused)
	}
	cfg, problem := r.settings.current()
	if r.proxy != nil {
		cfg.ProxyMetadata = r.proxy()
	}
	result, patch, err := inject.Admit(request.Object.Raw, namespace, cfg)
	if len(patch) > maxPatch {
		err = fmt.Errorf("not a valid pod: want one whose changes need at most %d MiB: shorten what it has in the fields that nametap changes", maxPatch>>20)
	}
	switch {
	case err != nil:
		return refusal(http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error()), outcomeInvalid
	case problem != "" && result.Outcome != inject.Skipped:
		return refusal(http.StatusInternalServerError, metav1.StatusReasonInternalError, problem+": correct the file, for example in the ConfigMap nametap-inject"), string(inject.Refused)
	case result.Outcome == inject.Refused:
		reason := clip.Text(result.Reasons[0], maxReason)
		r.log.Info("a pod was refused", "namespace", request.Namespace, "name", request.Name, "reason", reason)
		return refusal(http.StatusForbidden, metav1.StatusReasonForbidden, reason), string(inject.Refused)
	}
	r.log.Debug("a pod was created", "namespace", request.Namespace, "name", request.Name, "outcome", result.Outcome, "reasons", result.Reasons)
	response := &admissionv1.AdmissionResponse{
		Allowed:          true,
		AuditAnnotations: map[string]string{"outcome": string(result.Outcome), "reason": strings.Join(result.Reasons, "; ")},
	}
	if patch != nil {
		kind := admissionv1.PatchTypeJSONPatch
		response.Patch, response.PatchType = patch, &kind
	}
	return response, string(result.Outcome)
}

// namespace returns the namespace of a pod. The result has [inject.Label] only if labelled is true.
func (r reviewer) namespace(ctx context.Context, name string, labelled bool) (inject.Namespace, error) {
	namespace := inject.Namespace{Name: name}
	if r.read != nil {
		var err error
		if namespace.Labels, namespace.Annotations, err = r.read(ctx, name); err != nil {
			return namespace, err
		}
	}
	labels := map[string]string{}
	maps.Copy(labels, namespace.Labels)
	delete(labels, inject.Label)
	if labelled {
		labels[inject.Label] = inject.Enabled
	}
	namespace.Labels = labels
	return namespace, nil
}
