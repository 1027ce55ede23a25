package main

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// TestLeftOut checks that skipped tests are listed by their reason, and packages without tests are not.
func TestLeftOut(t *testing.T) {
	const events = `{"Action":"start","Package":"a"}
{"Action":"run","Package":"a","Test":"TestOne"}
{"Action":"output","Package":"a","Test":"TestOne","Output":"=== RUN   TestOne\n"}
{"Action":"output","Package":"a","Test":"TestOne","Output":"    netns.go:50: LEFT OUT: tests in network namespaces, they need root: operation not permitted\n"}
{"Action":"output","Package":"a","Test":"TestOne","Output":"--- SKIP: TestOne (0.00s)\n"}
{"Action":"skip","Package":"a","Test":"TestOne","Elapsed":0}
{"Action":"pass","Package":"a","Test":"TestTwo","Elapsed":0}
{"Action":"skip","Package":"b","Elapsed":0}
`
	left, err := leftOut(strings.NewReader(events))
	if err != nil {
		t.Fatal(err)
	}
	const reason = "tests in network namespaces, they need root: operation not permitted"
	if got := slices.Collect(maps.Keys(left)); len(got) != 1 || got[0] != reason || some(left[reason]) != "tests: 1: TestOne" {
		t.Errorf("%v", left)
	}
	if _, err := leftOut(strings.NewReader("FAIL\n")); err == nil {
		t.Error("no error for a line that is no event")
	}
}

// TestFailed checks that a few failed tests are listed, and a run in which anything else failed is not.
func TestFailed(t *testing.T) {
	const (
		one   = `{"Action":"fail","Package":"a","Test":"TestOne/part"}{"Action":"fail","Package":"a","Test":"TestOne"}`
		two   = `{"Action":"fail","Package":"a","Test":"TestTwo"}`
		race  = `{"Action":"output","Package":"a","Test":"TestTwo","Output":"WARNING: DATA RACE\n"}`
		died  = `{"Action":"fail","Package":"a"}`
		ended = `{"Action":"output","Package":"a","Output":"FAIL\n"}` + died
		other = `{"Action":"fail","Package":"b"}`
	)
	patterns, err := failed(strings.NewReader(one + two + ended))
	if err != nil || len(patterns) != 1 || patterns["a"] != "^(TestOne|TestTwo)$" {
		t.Errorf("%v, %v", patterns, err)
	}
	for _, events := range []string{"", one + ended + other, one + died, one + race + ended, two + race + ended, one + two + two + two + ended, "FAIL\n"} {
		if patterns, err := failed(strings.NewReader(events)); err == nil {
			t.Errorf("%s: %v", events, patterns)
		}
	}
}
