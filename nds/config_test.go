package nds_test

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/nds"
)

// The error for an invalid setting quotes the value and says what is expected.
func TestConfigErrors(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		change func(*nds.Config)
		want   []string
	}{
		{"no address", func(c *nds.Config) { c.Addr = "" }, []string{`""`, "want host:port"}},
		{"no port", func(c *nds.Config) { c.Addr = "istiod" }, []string{`"istiod"`, "want host:port"}},
		{"no host", func(c *nds.Config) { c.Addr = ":15010" }, []string{`":15010"`, "no host"}},
		{"named port", func(c *nds.Config) { c.Addr = "istiod:grpc" }, []string{`"istiod:grpc"`, "want host:port"}},
		{"port 0", func(c *nds.Config) { c.Addr = "istiod:0" }, []string{`"istiod:0"`, "port 0"}},
		{"port 65536", func(c *nds.Config) { c.Addr = "istiod:65536" }, []string{`"istiod:65536"`, "want host:port"}},
		{"no pod", func(c *nds.Config) { c.Node.PodName = "" }, []string{"pod name is empty"}},
		{"no namespace", func(c *nds.Config) { c.Node.Namespace = "" }, []string{"namespace is empty"}},
		{"namespace", func(c *nds.Config) { c.Node.Namespace = "a.b" }, []string{`"a.b"`, "without a dot"}},
		{"pod", func(c *nds.Config) { c.Node.PodName = "a~b" }, []string{`"a~b"`, "want a DNS name"}},
		{"domain", func(c *nds.Config) { c.Node.Domain = "a b" }, []string{`"a b"`, "want a DNS name"}},
		{"no address of the pod", func(c *nds.Config) { c.Node.IPs = nil }, []string{"web-0", "at least one"}},
		{"zero address", func(c *nds.Config) { c.Node.IPs = []netip.Addr{{}} }, []string{"invalid IP"}},
		{"labels", func(c *nds.Config) { c.Node.Labels = map[string]string{"a": "\xff"} }, []string{"metadata", "UTF-8"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig("istiod:15010")
			tc.change(&cfg)
			_, err := nds.New(cfg, func(map[int][]byte) error { return nil })
			if err == nil {
				t.Fatal("accepted")
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
		})
	}
	if _, err := nds.New(testConfig("istiod:15010"), nil); err == nil {
		t.Error("no apply function is accepted")
	}
}

// The JSON of the status endpoint.
func TestStatusJSON(t *testing.T) {
	t.Parallel()
	client, err := nds.New(testConfig("[::1]:15010"), func(map[int][]byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(client.Status())
	if err != nil {
		t.Fatal(err)
	}
	want := `{"connected":false,"open":false,"address":"[::1]:15010","variant":"incremental","loaded":false,"version":"",` +
		`"tableAgeSeconds":0,"stale":false,"pushes":0,"rejected":0,"reconnects":0}`
	if string(got) != want {
		t.Errorf("status is\n%s, want\n%s", got, want)
	}
}
