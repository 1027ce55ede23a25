package interop

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// resources are the kinds of objects of the tests, as in the paths of the API server.
var resources = map[string]string{
	"ClusterRole":                  "clusterroles",
	"ClusterRoleBinding":           "clusterrolebindings",
	"ConfigMap":                    "configmaps",
	"CustomResourceDefinition":     "customresourcedefinitions",
	"Endpoints":                    "endpoints",
	"EndpointSlice":                "endpointslices",
	"Namespace":                    "namespaces",
	"MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
	"Node":                         "nodes",
	"Pod":                          "pods",
	"Secret":                       "secrets",
	"Service":                      "services",
	"ServiceAccount":               "serviceaccounts",
	"ServiceEntry":                 "serviceentries",
	"ServiceImport":                "serviceimports",
	"Sidecar":                      "sidecars",
	"WorkloadEntry":                "workloadentries",
	"WorkloadGroup":                "workloadgroups",
}

// An object is one of the API server's.
type object struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace"`
		UID       string `json:"uid"`
	} `json:"metadata"`
	Status json.RawMessage `json:"status"`

	text string // in YAML
}

// parse returns the objects of YAML documents.
func (c *cluster) parse(text string) []object {
	c.tb.Helper()
	var objects []object
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		o := object{text: document}
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			c.tb.Fatalf("%v\n%s", err, document)
		}
		if o.Kind != "" {
			objects = append(objects, o)
		}
	}
	return objects
}

// path returns the object's path at the API server.
func (o object) path() string {
	path := "/apis/" + o.APIVersion
	if !strings.Contains(o.APIVersion, "/") {
		path = "/api/" + o.APIVersion
	}
	if o.Metadata.Namespace != "" {
		path += "/namespaces/" + o.Metadata.Namespace
	}
	return path + "/" + resources[o.Kind] + "/" + o.Metadata.Name
}

// apply creates or changes the objects of YAML documents, and their status if they have one.
func (c *cluster) apply(text string) {
	c.tb.Helper()
	for _, o := range c.parse(text) {
		paths := []string{o.path()}
		if o.Status != nil {
			paths = append(paths, o.path()+"/status")
		}
		for _, path := range paths {
			// The API server needs a moment to serve a new kind of objects.
			wait.Until(c.tb, path+" can be applied", func() bool {
				status, answer := c.try(http.MethodPatch, path+"?fieldManager=interop&force=true", "application/apply-patch+yaml", []byte(o.text))
				if status == http.StatusNotFound || status == 0 {
					return false
				}
				if status >= http.StatusBadRequest {
					c.tb.Fatalf("%s: status %d: %s", path, status, answer)
				}
				return true
			})
		}
	}
}

// remove deletes the objects of YAML documents.
func (c *cluster) remove(text string) {
	c.tb.Helper()
	for _, o := range c.parse(text) {
		c.request(http.MethodDelete, o.path()+"?gracePeriodSeconds=0", nil, nil)
	}
}

// get reads the object at a path into result.
func (c *cluster) get(path string, result any) {
	c.tb.Helper()
	c.request(http.MethodGet, path, nil, result)
}

// request sends a request with a body in JSON, unless it is nil, and reads the answer into
// result, unless it is nil. The test fails if the API server refuses the request.
func (c *cluster) request(method, path string, body, result any) {
	c.tb.Helper()
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			c.tb.Fatal(err)
		}
	}
	status, answer := c.try(method, path, "application/json", text)
	if status < http.StatusOK || status >= http.StatusMultipleChoices {
		c.tb.Fatalf("%s %s: status %d: %s", method, path, status, answer)
	}
	if result == nil {
		return
	}
	if err := json.Unmarshal(answer, result); err != nil {
		c.tb.Fatalf("%s %s: %v: %s", method, path, err, answer)
	}
}

// try sends a request and returns the status and the body of the answer. The status is 0 if
// the API server does not answer.
func (c *cluster) try(method, path, contentType string, body []byte) (status int, answer []byte) {
	c.tb.Helper()
	request, err := http.NewRequestWithContext(c.tb.Context(), method, fmt.Sprintf("https://%s%s", apiAddr, path), bytes.NewReader(body))
	if err != nil {
		c.tb.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+adminToken)
	if body != nil {
		request.Header.Set("Content-Type", contentType)
	}
	response, err := c.client.Do(request)
	if err != nil {
		return 0, []byte(err.Error())
	}
	defer response.Body.Close()
	if answer, err = io.ReadAll(response.Body); err != nil {
		return 0, []byte(err.Error())
	}
	return response.StatusCode, answer
}
