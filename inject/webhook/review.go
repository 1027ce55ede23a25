package webhook

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/inject"
)

// An answer is the response to a request.
type answer struct {
	status  int
	outcome string
	text    string // an AdmissionReview in JSON, or an error
}

// invalid returns the answer to something that is no question.
func invalid(status int, text string) answer { return answer{status, outcomeInvalid, text} }

// review answers a question.
func (w *Webhook) review(path string, body []byte) answer {
	var question admissionv1.AdmissionReview
	if err := json.Unmarshal(body, &question); err != nil {
		return invalid(http.StatusBadRequest, fmt.Sprintf("want an AdmissionReview in JSON: %v", err))
	}
	want := admissionv1.SchemeGroupVersion.String()
	if question.APIVersion != want || question.Kind != "AdmissionReview" || question.Request == nil || question.Request.UID == "" {
		return invalid(http.StatusBadRequest, fmt.Sprintf("want an AdmissionReview of %s with a request, got kind %q of %q (admissionReviewVersions)", want, question.Kind, question.APIVersion))
	}
	response, outcome := w.decide(path, question.Request)
	response.UID = question.Request.UID
	text, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: question.TypeMeta, Response: response})
	if err != nil {
		return invalid(http.StatusInternalServerError, fmt.Sprintf("writing the answer: %v", err))
	}
	return answer{http.StatusOK, outcome, string(text)}
}

// decide returns the answer to a question, without its UID, and the outcome.
func (w *Webhook) decide(path string, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	if request.Resource != (metav1.GroupVersionResource{Version: "v1", Resource: "pods"}) || request.SubResource != "" || request.Operation != admissionv1.Create {
		return &admissionv1.AdmissionResponse{
			Allowed:  true,
			Warnings: []string{fmt.Sprintf("nametap changes pods that are created only, not %s of %s: correct the rules of its MutatingWebhookConfiguration", request.Operation, request.Resource.Resource)},
		}, outcomeIgnored
	}
	namespace := inject.Namespace{Name: request.Namespace}
	if path == PathNamespace {
		namespace.Label = inject.Enabled
	}
	result, patch, err := inject.Admit(request.Object.Raw, namespace, w.settings.current())
	switch {
	case err != nil:
		return refusal(http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error()), outcomeInvalid
	case result.Outcome == inject.Refused:
		w.log.Info("a pod was refused", "namespace", request.Namespace, "name", request.Name, "reason", result.Reasons[0])
		return refusal(http.StatusForbidden, metav1.StatusReasonForbidden, result.Reasons[0]), string(inject.Refused)
	}
	w.log.Debug("a pod was created", "namespace", request.Namespace, "name", request.Name, "outcome", result.Outcome, "reasons", result.Reasons)
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

// refusal returns an answer with which the pod is not created.
func refusal(code int32, reason metav1.StatusReason, message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: "nametap cannot be added to this pod: " + message,
	}}
}
