package inject_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

// variable matches the use of a variable in an expression.
var variable = regexp.MustCompile(`\bvariables\.(\w+)`)

// TestPolicy checks that the API server can read the policies, that bindings name them, and that each
// variable is declared before it is used. test/machines/interop checks what they do.
func TestPolicy(t *testing.T) { // I1
	t.Parallel()
	for _, cfg := range []inject.Config{{}, resolv, {ControlPlane: "discovery:15012", IgnoredNamespaces: []string{}}} {
		text, err := inject.Policy(cfg)
		if err != nil {
			t.Fatal(err)
		}
		var mutating admissionregistrationv1.MutatingAdmissionPolicy
		var mutatingBinding admissionregistrationv1.MutatingAdmissionPolicyBinding
		var validating admissionregistrationv1.ValidatingAdmissionPolicy
		var validatingBinding admissionregistrationv1.ValidatingAdmissionPolicyBinding
		documents := strings.Split(string(text), "\n---\n")
		all := []any{&mutating, &mutatingBinding, &validating, &validatingBinding}
		if len(documents) != len(all) {
			t.Fatalf("%d documents", len(documents))
		}
		for i, into := range all {
			if err := kyaml.UnmarshalStrict([]byte(documents[i]), into); err != nil {
				t.Fatalf("%v\n%s", err, documents[i])
			}
		}
		if mutatingBinding.Spec.PolicyName != mutating.Name || validatingBinding.Spec.PolicyName != validating.Name || mutating.Name != inject.PolicyName {
			t.Errorf("the bindings are for %s and %s", mutatingBinding.Spec.PolicyName, validatingBinding.Spec.PolicyName)
		}
		if got := mutating.Spec.MatchConstraints.NamespaceSelector; (got == nil) != (cfg.IgnoredNamespaces != nil) {
			t.Errorf("namespaceSelector %v", got)
		}
		var names []string
		declared := func(expression string) {
			t.Helper()
			for _, match := range variable.FindAllStringSubmatch(expression, -1) {
				if !slices.Contains(names, match[1]) {
					t.Errorf("%s is not declared: %s", match[0], expression)
				}
			}
		}
		for _, v := range mutating.Spec.Variables {
			declared(v.Expression)
			names = append(names, v.Name)
		}
		declared(mutating.Spec.Mutations[0].JSONPatch.Expression)
		names = nil
		for _, v := range validating.Spec.Variables {
			declared(v.Expression)
			names = append(names, v.Name)
		}
		for _, v := range validating.Spec.Validations {
			declared(v.Expression + v.MessageExpression)
		}
	}
	if _, err := inject.Policy(inject.Config{Mode: "cni"}); err == nil {
		t.Error("a wrong mode gives policies")
	}
}
