"""Correct programs for rows like those of LeetCode, HumanEval, MBPP and LiveCodeBench.

"=== title", the program, "----", the tests, separated by empty lines. "++++" ends the row's setup.
Each one is also run as the row's own answer.
"""

# ruff: noqa: E501 - data
PROGRAMS = r"""
=== two sum
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen: return [seen[target - n], i]
            seen[n] = i
----
assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]

assert Solution().twoSum(nums=[3, 3], target=6) == [0, 1]
=== remove duplicates in place, returns a length
class Solution:
    def removeDuplicates(self, nums):
        k = 0
        for n in nums:
            if k == 0 or nums[k - 1] != n:
                nums[k] = n
                k += 1
        return k
----
nums = [0, 0, 1, 1, 2]
k = Solution().removeDuplicates(nums)
assert k == 3 and nums[:k] == [0, 1, 2]
=== rotate a matrix in place
def rotate(m):
    m[:] = [list(r) for r in zip(*m[::-1])]
----
m = [[1, 2], [3, 4]]
rotate(m)
assert m == [[3, 1], [4, 2]]
=== sort in place and return the list
def bubble(a):
    for i in range(len(a)):
        for j in range(len(a) - 1 - i):
            if a[j] > a[j + 1]: a[j], a[j + 1] = a[j + 1], a[j]
    return a
----
a = [3, 1, 2]
assert bubble(a) == [1, 2, 3] and a == [1, 2, 3]

a = []
assert bubble(a) == []
=== pop from a list and return the item
def take(items, counts):
    item = items.pop()
    counts[item] = counts.get(item, 0) + 1
    return item
----
items, counts = [1, 2], {}
assert take(items, counts) == 2 and take(items, counts) == 1
assert items == [] and counts == {1: 1, 2: 1}
=== invert a binary tree
class Solution:
    def invertTree(self, root):
        if root: root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
def levels(t): return t and [t.val, levels(t.left), levels(t.right)]
++++
root = TreeNode(1, TreeNode(2), TreeNode(3))
out = Solution().invertTree(root)
assert levels(out) == [1, [3, None, None], [2, None, None]] and out is root
=== build a tree with the class of the setup
from typing import Optional
class Solution:
    def sortedArrayToBST(self, nums) -> Optional[TreeNode]:
        if not nums: return None
        m = len(nums) // 2
        return TreeNode(nums[m], self.sortedArrayToBST(nums[:m]), self.sortedArrayToBST(nums[m + 1:]))
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
def depth(t): return 1 + max(depth(t.left), depth(t.right)) if t else 0
++++
t = Solution().sortedArrayToBST([1, 2, 3, 4, 5])
assert isinstance(t, TreeNode) and t.val == 3 and depth(t) == 3 and t.left.right is None
=== reverse a linked list
class Solution:
    def reverseList(self, head):
        prev = None
        while head: head.next, prev, head = prev, head, head.next
        return prev
----
class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
def build(v): return ListNode(v[0], build(v[1:])) if v else None
def values(n):
    out = []
    while n:
        out.append(n.val)
        n = n.next
    return out
++++
assert values(Solution().reverseList(build([1, 2, 3]))) == [3, 2, 1]

assert Solution().reverseList(None) is None
=== merge two lists with a dummy node
class Solution:
    def merge(self, a, b):
        tail = dummy = ListNode()
        while a and b:
            if a.val > b.val: a, b = b, a
            tail.next, a = a, a.next
            tail = tail.next
        tail.next = a or b
        return dummy.next
----
class ListNode:
    def __init__(self, val=0, next=None): self.val, self.next = val, next
    def __eq__(self, o): return isinstance(o, ListNode) and self.val == o.val and self.next == o.next
    def __repr__(self): return f"{self.val}->{self.next!r}"
++++
a, b = ListNode(1, ListNode(4)), ListNode(2, ListNode(3))
out = Solution().merge(a, b)
assert out == ListNode(1, ListNode(2, ListNode(3, ListNode(4)))) and repr(out) == "1->2->3->4->None"
=== cycle in a linked list
class Solution:
    def hasCycle(self, head):
        slow = fast = head
        while fast and fast.next:
            slow, fast = slow.next, fast.next.next
            if slow is fast: return True
        return False
    def ring(self, n):
        first = node = ListNode(0)
        for i in range(1, n):
            node.next = ListNode(i)
            node = node.next
        node.next = first
        return first
----
class ListNode:
    def __init__(self, val=0): self.val, self.next = val, None
++++
a, b = ListNode(1), ListNode(2)
a.next = b
assert not Solution().hasCycle(a)
b.next = a
assert Solution().hasCycle(a)

r = Solution().ring(3)
assert r.next.next.next is r and Solution().hasCycle(r)
=== a tree class in the program and in the setup
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right
class Codec:
    def serialize(self, t): return f"({t.val}{self.serialize(t.left)}{self.serialize(t.right)})" if t else "-"
    def deserialize(self, s):
        def read():
            nonlocal i
            i += 1
            if s[i - 1] == "-": return None
            j = i
            while s[i] not in "(-)": i += 1
            node = TreeNode(int(s[j:i]))
            node.left, node.right = read(), read()
            i += 1
            return node
        i = 0
        return read()
----
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
++++
c = Codec()
t = TreeNode(1, TreeNode(2), TreeNode(3, TreeNode(4)))
text = c.serialize(t)
again = c.deserialize(text)
assert c.serialize(again) == text and again.right.left.val == 4 and type(again) is TreeNode
=== clone a graph
class Solution:
    def cloneGraph(self, node):
        seen = {}
        def clone(n):
            if n not in seen:
                seen[n] = Node(n.val)
                seen[n].neighbors = [clone(m) for m in n.neighbors]
            return seen[n]
        return clone(node) if node else None
----
class Node:
    def __init__(self, val=0, neighbors=None):
        self.val, self.neighbors = val, neighbors or []
++++
a, b, c = Node(1), Node(2), Node(3)
a.neighbors, b.neighbors, c.neighbors = [b, c], [a], [a]
d = Solution().cloneGraph(a)
assert d is not a and d.val == 1 and [n.val for n in d.neighbors] == [2, 3]
assert d.neighbors[0].neighbors[0] is d
=== LRU cache
from collections import OrderedDict
class LRUCache:
    def __init__(self, capacity: int):
        self.cap, self.d = capacity, OrderedDict()
    def get(self, key):
        if key not in self.d: return -1
        self.d.move_to_end(key)
        return self.d[key]
    def put(self, key, value):
        self.d[key] = value
        self.d.move_to_end(key)
        if len(self.d) > self.cap: self.d.popitem(last=False)
----
c = LRUCache(2)
c.put(1, 1); c.put(2, 2)
assert c.get(1) == 1
c.put(3, 3)
assert c.get(2) == -1 and c.get(3) == 3 and list(c.d) == [1, 3]
=== a trie with membership
class Trie:
    def __init__(self): self.words = {}
    def insert(self, w):
        n = self.words
        for ch in w: n = n.setdefault(ch, {})
        n["$"] = True
    def __contains__(self, w):
        n = self.words
        for ch in w:
            if ch not in n: return False
            n = n[ch]
        return "$" in n
    def __len__(self): return len(self.words)
----
t = Trie()
t.insert("ab")
assert "ab" in t and "a" not in t and len(t) == 1
=== a fraction with operators and equality
from math import gcd
class Frac:
    def __init__(self, n, d=1):
        g = gcd(n, d)
        self.n, self.d = n // g, d // g
    def _of(self, o): return o if isinstance(o, Frac) else Frac(o)
    def __add__(self, o): return Frac(self.n * self._of(o).d + self._of(o).n * self.d, self.d * self._of(o).d)
    __radd__ = __add__
    def __eq__(self, o): return isinstance(o, (Frac, int)) and (self.n, self.d) == (self._of(o).n, self._of(o).d)
    def __lt__(self, o): return self.n * self._of(o).d < self._of(o).n * self.d
    def __hash__(self): return hash((self.n, self.d))
    def __repr__(self): return f"Frac({self.n}, {self.d})"
----
assert Frac(1, 2) + Frac(1, 3) == Frac(5, 6) and Frac(2, 4) == Frac(1, 2)

assert Frac(1, 2) + Frac(1, 2) == 1 and 1 + Frac(1, 2) == Frac(3, 2) and Frac(1, 2) + 1 == Frac(3, 2)

assert sorted([Frac(1, 2), Frac(1, 3)]) == [Frac(1, 3), Frac(1, 2)] and Frac(1, 2) < 1

assert len({Frac(1, 2), Frac(2, 4)}) == 1 and repr([Frac(1, 2)]) == "[Frac(1, 2)]" and sum([Frac(1)]) == 1
=== equality that ignores a cache
class Doc:
    def __init__(self, t): self.t, self._n = t, None
    def words(self):
        if self._n is None: self._n = len(self.t.split())
        return self._n
    def __eq__(self, o): return self.t == o.t
----
a, b = Doc("x y"), Doc("x y")
assert a.words() == 2 and a == b and a != Doc("z") and [a] == [b] and b in [a]
=== equality across classes
class Square:
    def __init__(self, s): self.s = s
    def __eq__(self, o): return self.area() == o.area()
    def area(self): return self.s ** 2
class Rect(Square):
    def __init__(self, a, b): self.a, self.b = a, b
    def area(self): return self.a * self.b
----
assert Square(2) == Rect(1, 4) and Rect(4, 1) == Square(2) and not Square(2) == Rect(1, 5)
=== equality with a tolerance
class V:
    def __init__(self, *c): self.c = c
    def __eq__(self, o): return len(self.c) == len(o.c) and all(abs(a - b) < 1e-9 for a, b in zip(self.c, o.c))
    def __mul__(self, k): return V(*(a * k for a in self.c))
    def __rmul__(self, k): return self * k
    def __matmul__(self, o): return sum(a * b for a, b in zip(self.c, o.c))
    def __neg__(self): return self * -1
    def __abs__(self): return (self @ self) ** 0.5
    def __iter__(self): return iter(self.c)
    def __getitem__(self, i): return self.c[i]
----
assert V(0.1) * 3 == V(0.3) and 2 * V(1, 2) == V(2, 4) and V(1, 2) @ V(3, 4) == 11

assert abs(V(3, 4)) == 5.0 and list(-V(1, 2)) == [-1, -2] and V(5, 6)[1] == 6 and tuple(V(1)) == (1,)
=== HumanEval: a helper of the prompt
def is_palindrome(s): return s == s[::-1]
def make_palindrome(s):
    for i in range(len(s)):
        if is_palindrome(s[i:]): return s + s[:i][::-1]
    return s
----
def check(candidate):
    assert candidate("cat") == "catac"
    assert candidate("") == ""
check(make_palindrome)

=== random numbers that the program cannot predict
import numpy as np
def f(x): return np.random.rand()
----
import numpy as np
assert f(1) != np.random.rand()
"""
