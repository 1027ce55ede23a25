package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	wait.Prepare()
	testscript.Main(m, map[string]func(){"nametap-discovery": main})
}

// TestScripts runs the scripts in testdata/script with the real command.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			// The race detector would wait for a second at the end of each command.
			e.Setenv("GORACE", "atexit_sleep_ms=0")
			a := fakekube.Start(t)
			a.Put(fakekube.Services, "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.0.1}\n")
			e.Setenv("CLUSTER", a.Kubeconfig())
			certificate, key := fakexds.NewAuthority(t, "nametap-discovery.nametap-system.svc", "discovery").Server()
			for name, text := range map[string]string{"CERT": certificate, "KEY": key} {
				file := filepath.Join(e.WorkDir, name+".pem")
				e.Setenv(name, file)
				if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
					return err
				}
			}
			return os.CopyFS(e.Getenv("WORK")+"/examples", examples.Files)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"logged":  cmdLogged,
			"get":     cmdGet,
			"term":    cmdTerm,
			"refused": cmdRefused,
		},
	})
}

// cmdLogged waits until a file contains a text: "logged FILE TEXT [VARIABLE]". It sets
// the variable to the word after the text.
func cmdLogged(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 || len(args) > 3 {
		ts.Fatalf("usage: logged FILE TEXT [VARIABLE]")
	}
	var after string
	defer func() {
		if after == "" { // the wait has failed
			ts.Logf("%s is:\n%s", args[0], ts.ReadFile(args[0]))
		}
	}()
	wait.Until(ts, fmt.Sprintf("%s contains %q", args[0], args[1]), func() bool {
		data, err := os.ReadFile(ts.MkAbs(args[0]))
		_, rest, _ := strings.Cut(string(data), args[1])
		if err == nil && strings.Contains(rest, "\n") { // the line is complete
			after = rest
		}
		return after != ""
	})
	if len(args) == 3 {
		ts.Setenv(args[2], strings.Fields(after)[0])
	}
}

// cmdGet gets a URL until the response has a status, and a text: "get STATUS URL [TEXT]".
func cmdGet(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 || len(args) > 3 {
		ts.Fatalf("usage: get STATUS URL [TEXT]")
	}
	wait.Until(ts, "GET "+strings.Join(args, " "), func() bool {
		resp, err := http.Get(args[1])
		if err != nil {
			return false
		}
		body, err := io.ReadAll(resp.Body)
		ts.Check(err)
		ts.Check(resp.Body.Close())
		return strings.HasPrefix(resp.Status, args[0]) && (len(args) < 3 || strings.Contains(string(body), args[2]))
	})
}

// cmdTerm sends SIGTERM to a background command: "term NAME".
func cmdTerm(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: term NAME")
	}
	for _, c := range ts.BackgroundCmds() {
		ts.Check(c.Process.Signal(syscall.SIGTERM))
	}
}

// cmdRefused gets a URL with a header, and expects 403: "refused URL HEADER VALUE".
func cmdRefused(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 3 {
		ts.Fatalf("usage: refused URL HEADER VALUE")
	}
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, args[0], http.NoBody)
	ts.Check(err)
	req.Header.Set(args[1], args[2])
	if args[1] == "Host" {
		req.Host = args[2]
	}
	resp, err := http.DefaultClient.Do(req)
	ts.Check(err)
	ts.Check(resp.Body.Close())
	if resp.StatusCode != http.StatusForbidden {
		ts.Fatalf("%s with %s: got %s", args[0], args[1:], resp.Status)
	}
}
